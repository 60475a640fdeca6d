"""Scattering features against convolutions in space, their symmetries, and what trains on them."""

import json
import os
import pathlib

import numpy as np
import pytest

from examples.experiments.lib import scattering
from examples.experiments.lib.datasets import images, scattered
from examples.experiments.scattering import run as scattering_run
from tests.helpers.programs import (
    assert_stored_trials_are_those_of_the_plan,
    run_example,
    run_experiment,
)

PICTURES = np.random.default_rng(0).random((3, 8, 8), np.float32)


def gabor(size, deviation, slant, angle, frequency):
    """A Gaussian times a plane wave around pixel (0, 0), on a torus; sums to 1 without the wave."""
    total = np.zeros([size, size], complex)
    reach = np.arange(-4 * size, 4 * size)
    down, right = np.meshgrid(reach, reach, indexing="ij")
    along = np.cos(angle) * down + np.sin(angle) * right
    across = np.cos(angle) * right - np.sin(angle) * down
    bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    values = slant / (2 * np.pi * deviation**2) * bell * np.exp(1j * frequency * along)
    np.add.at(total, (down % size, right % size), values)
    return total


def convolved(picture, kernel):
    """A circular convolution, written out."""
    out = np.zeros(picture.shape, complex)
    for shift in np.ndindex(kernel.shape):
        out += kernel[shift] * np.roll(picture, shift, (0, 1))
    return out


def scattered_in_space(picture):
    """The features of one picture by convolutions of all pixels, the channels in order."""
    padded = np.pad(picture.astype(float), 4, mode="reflect")
    size = len(padded)
    window = gabor(size, 1.6, 1, 0, 0)
    averaged = lambda u: convolved(u, window).real[4:-4:4, 4:-4:4]  # noqa: E731
    waves = []
    for scale in range(2):
        for turn in range(8):
            shape = (size, 0.8 * 2**scale, 0.5, (3 - turn) * np.pi / 8)
            wave, still = gabor(*shape, 0.75 * np.pi / 2**scale), gabor(*shape, 0)
            waves.append((scale, wave - still * wave.sum() / still.sum()))
    first, second = [], []
    for scale, wave in waves:
        once = abs(convolved(padded, wave))
        first.append(averaged(once))
        second += [averaged(abs(convolved(once, w))) for s, w in waves if s > scale]
    return np.stack([averaged(padded), *first, *second])


def test_they_are_moduli_of_convolutions_in_space():
    expected = scattered_in_space(PICTURES[0])
    found = scattering.scatter(PICTURES[:1])[0]
    assert found.shape == (81, 2, 2) and found.dtype == np.float32
    np.testing.assert_allclose(found[:9], expected[:9], atol=1e-6)  # mean and finest scale
    # The transform computes the second scale on fewer pixels, which changes a little.
    for channels in (slice(9, 17), slice(17, 81)):
        size = expected[channels].mean()
        np.testing.assert_allclose(found[channels], expected[channels], atol=0.1 * size)


def test_transposing_a_picture_transposes_its_features_and_mirrors_directions():
    found = scattering.scatter(PICTURES)
    mirrored = scattering.scatter(PICTURES.transpose(0, 2, 1)).transpose(0, 1, 3, 2)
    turns = (2 - np.arange(8)) % 8  # (3 - k)π/8 becomes π/2 - (3 - k)π/8, and half a turn is none
    for at in (1, 9):
        np.testing.assert_allclose(mirrored[:, at : at + 8], found[:, at + turns], atol=1e-5)
    pairs = (found[:, 17:].reshape(3, 8, 8, 2, 2)[:, turns][:, :, turns]).reshape(3, 64, 2, 2)
    np.testing.assert_allclose(mirrored[:, 17:], pairs, atol=1e-5)
    assert abs(mirrored[:, 1:9] - found[:, 1:9]).max() > 0.01


def test_features_move_with_the_picture():
    picture = np.zeros([1, 32, 32], np.float32)
    picture[0, 12:20, 12:20] = PICTURES[0]
    moved = scattering.scatter(np.roll(picture, (4, -4), (1, 2)))
    expected = np.roll(scattering.scatter(picture), (1, -1), (2, 3))
    np.testing.assert_allclose(moved[..., 2:-2, 2:-2], expected[..., 2:-2, 2:-2], atol=1e-6)


def test_no_filter_amplifies_and_wavelets_ignore_brightness():
    wavelets, window = scattering.filter_bank(36, 36, 2, 8)
    mirrored = lambda f: np.roll(f[::-1, ::-1], (1, 1), (0, 1))  # noqa: E731
    gain = window**2 + sum((w**2 + mirrored(w) ** 2) / 2 for _, w in wavelets)
    assert gain.max() <= 1 + 1e-6 and gain[abs(np.fft.fftfreq(36)) < 0.4].mean() > 0.5
    flat = scattering.scatter(np.ones([1, 28, 28]))
    np.testing.assert_allclose(flat[:, 0], 1, atol=1e-6)
    np.testing.assert_allclose(flat[:, 1:], 0, atol=1e-6)


def test_each_group_has_mean_0_and_variance_1_in_each_example():
    colors = np.random.default_rng(1).random((2, 8, 8, 3))
    grouped = scattering.features(colors, groups=27).reshape(2, 27, 9 * 4)
    np.testing.assert_allclose(grouped.mean(-1), 0, atol=1e-5)
    deviations = scattering.scatter(colors[0].transpose(2, 0, 1)).reshape(27, -1).std(-1)
    expected = deviations / np.sqrt(deviations**2 + scattering.EPSILON)
    np.testing.assert_allclose(grouped[0].std(-1), expected, rtol=1e-4)
    with pytest.raises(ValueError, match="groups=26, 243 channels"):
        scattering.features(colors, groups=26)


@pytest.mark.parametrize("compute", [scattering.features, scattering.mirrored_features])
def test_no_example_depends_on_the_others(compute):
    together = compute(PICTURES[..., None])
    for k in range(3):
        alone = compute(PICTURES[k : k + 1, ..., None])
        np.testing.assert_allclose(alone[0], together[k], atol=1e-5)
    changed = np.concatenate([PICTURES[:1], np.full([2, 8, 8], np.nan)])[..., None]
    np.testing.assert_allclose(compute(changed)[0], together[0], atol=1e-5)


def test_mirrored_features_are_means_of_the_roots_of_both_pictures():
    colors = np.random.default_rng(3).normal(size=(2, 8, 16, 3))
    found = scattering.mirrored_features(colors)
    assert found.shape == (2, 243 * 2 * 2)
    np.testing.assert_allclose(scattering.mirrored_features(colors[:, :, ::-1]), found, atol=1e-5)
    planes = colors.transpose(0, 3, 1, 2).reshape(6, 8, 16)
    roots = [
        np.sign(c) * abs(c) ** 0.5 for c in map(scattering.scatter, (planes, planes[..., ::-1]))
    ]
    whole = (roots[0] + roots[1]) / 2
    np.testing.assert_allclose(found.reshape(6, 81, 2, 2), whole[..., :2], atol=1e-6)
    with pytest.raises(ValueError, match=r"multiple of 8.*\(1, 8, 12, 3\)"):
        scattering.mirrored_features(np.zeros([1, 8, 12, 3]))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"multiples of 4.*\(1, 30, 28\)"):
        scattering.scatter(np.zeros([1, 30, 28]))


def test_features_are_computed_once_and_kept(tmp_path, monkeypatch):
    pixels = np.random.default_rng(2).integers(0, 256, [5, 8, 8, 3], np.uint8)
    asked = []

    def load(name, split, data_dir):
        asked.append((name, split, data_dir))
        return pixels, np.arange(5)

    monkeypatch.setattr(images, "load", load)
    monkeypatch.setattr(scattered, "CHUNK", 2)
    for _ in range(2):
        x, y = scattered.load("cifar10", "train[:5]", "/data", tmp_path / "features")
    assert asked == [("cifar10", "train[:5]", "/data")]
    assert x.shape == (5, 243 * 4) and x.dtype == np.float16 and isinstance(x, np.memmap)
    scaled = (pixels / 255 - scattered.MEAN["cifar10"]) / scattered.STD["cifar10"]
    np.testing.assert_allclose(x, scattering.features(scaled), rtol=1e-3, atol=2e-3)
    assert y.tolist() == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "features").iterdir())) == 2
    x, _ = scattered.load("cifar10", "train[:5]", "/data", tmp_path / "features", mirrored=True)
    np.testing.assert_allclose(x, scattering.mirrored_features(scaled), rtol=1e-3, atol=2e-3)
    assert len(list((tmp_path / "features").iterdir())) == 4


@pytest.mark.parametrize("dataset", scattered.PAPER)
def test_the_stored_trials_are_those_of_the_plan(dataset):
    table = assert_stored_trials_are_those_of_the_plan(scattering_run, dataset)
    assert "| ADADP, defaults |" in table


@pytest.fixture
def data_dir():
    found = os.environ.get("TFDS_DATA_DIR")
    if not found or not (pathlib.Path(found) / "mnist").is_dir():
        pytest.skip("needs MNIST: set TFDS_DATA_DIR to a tensorflow-datasets folder that has it")
    return found


@pytest.mark.slow
def test_the_experiment_trains_each_method(tmp_path, monkeypatch, data_dir):
    monkeypatch.setenv("SCATTERING_FEATURES", str(tmp_path))
    out, trials = run_experiment("scattering", tmp_path, "--data_dir", data_dir, dataset="mnist")
    of_cifar10 = ("adadp_normalized", "adadp_mirrored")
    for method, title in scattering_run.TITLES.items():
        assert (f"| {title} |" in out) == (method not in of_cifar10)
    for trial in trials:
        result = trial["result"]
        assert result["epochs"] == [1, 2, 3, 4] and 2.9 < result["epsilon"][-1] <= 3
        assert result["accuracy"][-1] > 0.3 and result["steps"] == 32


@pytest.mark.slow
def test_the_example_reports_and_is_restored(tmp_path, data_dir):
    arguments = ("--data_dir", data_dir, "--out_dir", tmp_path, "--max_examples", 1000)
    arguments += ("--batch_size", 200, "--epochs", 8)
    out = run_example("scattered_images.py", *arguments)
    result = json.loads(out.splitlines()[-1])
    assert result["test_accuracy"] > 0.4 and 2.9 < result["epsilon"] <= 3
    assert "proven upper bound" in out and "1000 examples of 3969 features" in out
    again = run_example("scattered_images.py", *arguments)
    restored = json.loads(again.splitlines()[-1])
    assert restored["test_accuracy"] == result["test_accuracy"]
    assert "features in" not in again and "Epoch 1/" not in again
