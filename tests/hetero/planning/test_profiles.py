"""hetero/planning/profiles: what is shipped can be loaded, and is found by name."""

import pytest

from hetero.planning.profiles import find_profile, listing, shipped_profiles
from hetero.text_table import terminal_width


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_is_whole_and_says_where_it_is_from(name):
    profile = find_profile(name)
    assert profile.name == name
    assert "Not measured" in profile.source


def test_a_path_is_a_file_and_an_unknown_name_is_answered(tmp_path):
    with pytest.raises(ValueError, match="cannot read the profile"):
        find_profile(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="did you mean '8xh200-node'"):
        find_profile("8xh200")
    with pytest.raises(ValueError, match="did you mean 'rtx4090-nvme'"):
        find_profile("4090")


def test_the_listing_says_what_each_is_and_where_its_figures_are_from():
    lines = listing()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.partition(":")[0] for line in heads] == list(shipped_profiles())
    assert "rtx4090-nvme: a GPU of 22.4 GiB, 59.6 GiB of RAM, NVMe at 6.5 GB/s" in heads
    assert max(map(len, lines)) <= terminal_width()
    assert "    Not measured. From data sheets: NVIDIA GeForce RTX 4090" in "\n".join(lines)
