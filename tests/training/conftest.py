from pathlib import Path

import pytest

from tests.support.pipelines import build_pipeline
from tests.support.runs import draw_pictures


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory):
    return build_pipeline("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory):
    return build_pipeline("sd3", tmp_path_factory.mktemp("sd3"))


@pytest.fixture(scope="session")
def four_pictures(tmp_path_factory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("pictures"), 4)


@pytest.fixture
def basics(tmp_path, four_pictures, request):
    """Returns the options of a short run: `basics(family, name)`."""

    def of(family: str, name: str) -> dict[str, object]:
        folder = request.getfixturevalue(f"{family}_folder")
        places = {"model": folder, "data": four_pictures, "output_dir": tmp_path / "runs", "name": name}
        return {**places, "steps": 3, "batch": 2}

    return of
