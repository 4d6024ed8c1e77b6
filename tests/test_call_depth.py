"""The way from `train.py` to the first matrix product of a training step is short enough to read."""

import runpy
import sys
from types import FrameType

import pytest
from jax.extend.core.primitives import dot_general_p

from tests.helpers import ROOT, tiny, write_books

MAX_FRAMES, MAX_FILES = 14, 10


class FirstProduct(BaseException):
    """Raised at the first product, so that the rest need not run."""


def project_frames(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return file and function of each frame of this project, the outermost first."""
    frames = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((f"{ROOT}/jaxformer/", f"{ROOT}/train.py")):
            frames.append((file.removeprefix(f"{ROOT}/"), frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


@pytest.mark.slow
def test_few_frames_lead_to_the_first_matrix_product(monkeypatch, tmp_path):
    frames: list[tuple[str, str]] = []

    def record(*args, **kwargs):
        frames.extend(project_frames(sys._getframe(1)))
        if ("jaxformer/train/step.py", "train_step") in frames:
            raise FirstProduct
        frames.clear()
        return bind(*args, **kwargs)

    bind = dot_general_p.bind
    monkeypatch.chdir(tmp_path)
    changes = ("--train.batch-size", "8", "--train.report-every", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", *tiny(write_books(tmp_path / "books"), 20, *changes)])
    monkeypatch.setattr(dot_general_p, "bind", record)
    with pytest.raises(FirstProduct):
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    path = "\n".join(f"{file}: {function}" for file, function in frames)
    n_files = len({file for file, _ in frames})
    assert len(frames) <= MAX_FRAMES and n_files <= MAX_FILES, f"{len(frames)} frames in {n_files} files:\n{path}"
