"""Files that are there as a whole, or not at all, on this machine and behind a URL."""

from __future__ import annotations

import pytest

from lightning_recsys.checkpoints.places import place_of, whole_file


@pytest.fixture(params=["path", "url"])
def place(request, tmp_path):
    return place_of(f"{tmp_path}/state.pt" if request.param == "path" else f"memory:/{tmp_path}/state.pt")


def test_file_when_it_is_left_then_it_is_there_alone(place):
    for content in (b"first", b"second"):
        with whole_file(place) as file:
            file.write(content)
        assert place.read_bytes() == content
    assert [x.name for x in place.parent.iterdir()] == [place.name]


def test_file_when_writing_fails_then_the_one_before_stays(place):
    with whole_file(place) as file:
        file.write(b"first")
    with pytest.raises(TypeError), whole_file(place) as file:
        file.write([b"second"])
    assert place.read_bytes() == b"first"
    assert [x.name for x in place.parent.iterdir()] == [place.name]
