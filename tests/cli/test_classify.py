"""`sample.py` on the runs of models that see."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxformer.cli import sample
from jaxformer.config import Config, ModelConfig, Resizing
from jaxformer.data.captions import CaptionsConfig
from jaxformer.data.image_io import read_model_input
from jaxformer.data.images import ImagesConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.videos import MovingImagesConfig
from jaxformer.errors import UserError
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run, load_run
from tests.arrays import apply
from tests.data.test_captions import MODEL as CLIP
from tests.runs.random_runs import saved_run

BYTES = Tokenizer.train(["a b"], 257)
IMAGES = ViTConfig((2, 3), 3, 3, patch_size=(1, 3), d_model=8, n_heads=2, n_blocks=1, d_ff=(12,))
VIDEOS = ViViTConfig(
    (2, 3), 1, 4, patch_size=(1, 3), d_model=8, n_heads=2, n_blocks=1, d_ff=(12,), n_frames=2, tubelet_frames=1
)


def make(folder: Path, name: str, model: ModelConfig, data, tokenizer=None, classes=()) -> str:
    """A run with random parameters."""
    path = create_run(folder / name, Config(name, model, data, steps=1), tokenizer, allow_suffix=False, classes=classes)
    shapes = jax.eval_shape(model.build().init, jax.random.key(0), *model.example())["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), shapes)
    with CheckpointManager(path) as checkpoints:
        checkpoints.save(1, params, {"none": jnp.zeros(1)}, {"step": 1}, None)
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    captions = replace(CLIP, text=replace(CLIP.text, vocab_size=257))
    return {
        "images": make(folder, "images", IMAGES, ImagesConfig(), classes=("owl", "wren", "kite")),
        "videos": make(folder, "videos", VIDEOS, MovingImagesConfig(n_directions=4)),
        "captions": make(folder, "captions", captions, CaptionsConfig(), BYTES),
        "features": make(folder, "features", replace(IMAGES, n_classes=0, resizing=Resizing((4,))), ImagesConfig()),
        "text": str(saved_run(folder / "text", [" ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop") * 3])),
    }


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's size, of another, and some that move."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, shape in (("fits.png", (2, 3, 3)), ("large.jpg", (16, 24, 3)), ("small.png", (4, 4, 3))):
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(name)
    frames = [Image.fromarray(np.full((2, 3), 50 * i, np.uint8)) for i in range(5)]
    frames[0].save("moving.gif", save_all=True, append_images=frames[1:])
    Path("broken.png").write_bytes(b"no picture")


@pytest.mark.slow
def test_classes_are_printed_by_name_with_the_probabilities_of_the_model(
    runs: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    assert sample.main(["--run", runs["images"], "--images", "fits.png", "large.jpg", "--jsonl"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    run = load_run(runs["images"])
    expected = jax.nn.softmax(apply(run.model, run.params, np.asarray(Image.open("fits.png"))))
    assert first["image"] == "fits.png" and second["image"] == "large.jpg"
    assert dict(first["shows"]) == pytest.approx(
        dict(zip(("owl", "wren", "kite"), expected.tolist(), strict=True)), rel=1e-3
    )
    assert [p for _, p in first["shows"]] == sorted((p for _, p in first["shows"]), reverse=True)
    assert first["shows"] != second["shows"]

    assert sample.main(["--run", runs["images"], "--images", "fits.png"]) == 0
    assert capsys.readouterr().out == "fits.png: " + ", ".join(f"{n} {p:.3f}" for n, p in first["shows"]) + "\n"


@pytest.mark.slow
def test_a_video_is_an_animated_image_and_unnamed_classes_are_numbers(
    runs: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    np.testing.assert_array_equal(
        read_model_input("moving.gif", (2, 2, 3, 1))[:, 0, 0, 0], [0, 200]
    )  # the first and last
    assert sample.main(["--run", runs["videos"], "--images", "moving.gif", "--jsonl", "--weights", "int8"]) == 0
    shows = json.loads(capsys.readouterr().out)["shows"]
    assert sorted(name for name, _ in shows) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_zero_shot_probabilities_equal_those_of_all_cosines(
    runs: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    texts = ["red", "a blue one", "teal"]
    assert sample.main(["--run", runs["captions"], "--images", "small.png", "--prompt", *texts, "--jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    run = load_run(runs["captions"])
    logits = []
    for text in texts:
        tokens = np.array([BYTES.end_of_text, *BYTES.encode(text), BYTES.end_of_text])
        image_E, text_E, log_scale = apply(run.model, run.params, np.asarray(Image.open("small.png")), tokens)
        logits.append(float(jnp.exp(log_scale) * image_E @ text_E))
    expected = dict(zip(texts, np.asarray(jax.nn.softmax(jnp.array(logits))).tolist(), strict=True))
    assert dict(row["shows"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_images_are_ranked_for_each_text(runs: dict[str, str], capsys: pytest.CaptureFixture) -> None:
    """The logit of an image and a text is the same in both rankings."""
    images, texts = ["small.png", "large.jpg"], ["red", "teal"]
    options = ["--run", runs["captions"], "--images", *images, "--prompt", *texts, "--jsonl"]
    assert sample.main(options) == 0
    by_image = [dict(json.loads(line)["shows"]) for line in capsys.readouterr().out.splitlines()]
    assert sample.main([*options, "--by-text"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == texts
    p = [dict(row["images"]) for row in rows]
    odds = [shows["red"] / shows["teal"] for shows in by_image]
    assert odds[0] / odds[1] == pytest.approx(
        p[0][images[0]] / p[0][images[1]] / (p[1][images[0]] / p[1][images[1]]), rel=1e-2
    )


@pytest.mark.slow
def test_a_model_without_a_head_prints_features_or_their_cosines(runs, capsys: pytest.CaptureFixture) -> None:
    images = ["small.png", "large.jpg"]
    assert sample.main(["--run", runs["features"], "--images", *images, "--jsonl"]) == 0
    vectors = [json.loads(line)["vector"] for line in capsys.readouterr().out.splitlines()]
    run = load_run(runs["features"])
    pixels = np.asarray(Image.open("small.png"))[1:3, :3]  # 4 x 4 pixels, not resized; odd margins are on the right
    np.testing.assert_allclose(vectors[0], apply(run.model, run.params, pixels), rtol=1e-5)
    assert sample.main(["--run", runs["features"], "--images", *images]) == 0
    cosine = np.dot(*vectors) / np.prod(np.linalg.norm(vectors, axis=1))
    assert capsys.readouterr().out == f" 1.000 {cosine:6.3f} small.png\n{cosine:6.3f}  1.000 large.jpg\n"


@pytest.mark.slow
def test_valid_texts_of_a_file_are_ranked(runs: dict[str, str], tmp_path: Path, capsys) -> None:
    (tmp_path / "texts.txt").write_text("red\nmuch too long to be read\n")
    assert sample.main(["--run", runs["captions"], "--images", "small.png", "--prompts-file", "texts.txt"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "small.png: red 1.000\n"
    assert "line 2, has 24 tokens; it may have at most 10" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("images", [], "there is nothing for image classification; give --images"),
        ("images", ["--images", "fits.png", "--temperature", "1"], "--temperature does not apply"),
        ("images", ["--images", "none.png"], "none.png cannot be read"),
        ("images", ["--images", "broken.png"], "broken.png cannot be read as an image (cannot identify"),
        ("videos", ["--images", "fits.png"], "fits.png has 1 frame(s), but the model needs 2"),
        ("captions", ["--images", "small.png"], "zero-shot classification; give --prompt or --prompts-file"),
        ("captions", ["--images", "small.png", "--prompt", "x" * 11], "the prompt has 11 tokens"),
        ("text", ["--images", "fits.png"], "--images does not apply to text generation"),
    ],
)
def test_invalid_options_are_one_sentence_errors(runs, name: str, options: list[str], message: str, capsys) -> None:
    assert sample.main(["--run", runs[name], *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.fixture
def copied(runs: dict[str, str], tmp_path: Path) -> Path:
    """A run of images that can be changed."""
    return Path(shutil.copytree(runs["images"], tmp_path / "run"))


@pytest.mark.slow
def test_changed_class_names_are_refused_and_may_be_removed(copied: Path) -> None:
    (copied / "classes.json").write_text('["owl", "cat", "dog"]')
    with pytest.raises(
        UserError, match=r"classes\.json is missing, is not the one .* restore both, or remove it to use class numb"
    ):
        load_run(copied)
    (copied / "classes.json").unlink()
    assert load_run(copied).classes == ()


def test_a_truncated_animation_is_a_one_sentence_error() -> None:
    """However much of it there is, Pillow's error or none is what one gets."""
    content = Path("moving.gif").read_bytes()
    wrong = 0
    for n in range(4, len(content), 7):
        Path("cut.gif").write_bytes(content[:n])
        try:
            read_model_input("cut.gif", (5, 2, 3, 1))
        except UserError as error:
            assert str(error).startswith("cut.gif ")
            wrong += 1
    assert wrong > 10


def test_an_image_is_turned_by_its_exif_orientation() -> None:
    """EXIF orientation 6: the camera lay on its side, so that the left column of what it saw comes first as the top."""
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save("turned.png", exif=exif)
    np.testing.assert_array_equal(read_model_input("turned.png", (3, 2, 1))[..., 0], np.rot90(pixels, -1))
