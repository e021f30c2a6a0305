"""Checks of what is installed."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.cli.doctor.facts import SoftwareFacts
from hetero.cli.doctor.finding import Finding, note, ok
from hetero.cli.extras import install_line


def check_versions(facts: SoftwareFacts) -> Finding:
    """What hetero runs with."""
    return ok("versions", _list(facts.versions))


def check_extras(facts: SoftwareFacts) -> list[Finding]:
    """One finding for each extra, by name."""
    return [_check_extra(extra, packages) for extra, packages in facts.extras.items()]


def _check_extra(extra: str, packages: Mapping[str, str | None]) -> Finding:
    name = f"extra {extra}"
    missing = [package for package, version in packages.items() if version is None]
    if missing:
        return note(name, f"missing: {', '.join(missing)}", install_line(extra))
    return ok(name, _list({package: version or "" for package, version in packages.items()}))


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())
