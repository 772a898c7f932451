import pytest

from tests.support.pipelines import build_pipeline


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory):
    return build_pipeline("flux", tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory):
    return build_pipeline("sd3", tmp_path_factory.mktemp("sd3"))
