"""hetero/planning/profiles: what is shipped can be loaded, and is found by name."""

import pytest

from hetero.planning.profiles import find_profile, shipped_profiles


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
