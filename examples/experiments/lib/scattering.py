"""Scattering features of images: wavelets, moduli and local means, with nothing learned.

The scattering network of Bruna and Mallat with two layers. A picture x is convolved with wavelets
ψ of several scales and directions; the moduli of the results, which no longer oscillate, are
convolved with the wavelets once more; and everything is averaged by the window φ, 2^J pixels wide:

    x ⋆ φ,    |x ⋆ ψ₁| ⋆ φ,    ||x ⋆ ψ₁| ⋆ ψ₂| ⋆ φ,    the scale of ψ₂ above that of ψ₁

The filters are fixed, and each picture is transformed and normalized by itself. So the features are
a public function of one example and cost no privacy.

kymatio 0.3, which needs SciPy below 1.17, gives the same features up to 2e-5: it writes 3.1415 for
π in the norm of a filter. With that undone, the largest difference is 3e-7.

References:
  - Bruna and Mallat, "Invariant Scattering Convolution Networks" (2013), arXiv:1203.1513.
  - Oyallon and Mallat, "Deep Roto-Translation Scattering for Object Classification" (2015),
    arXiv:1412.8659, for the shape of the filters.
  - Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)"
    (2020), arXiv:2011.11660, for the use of both.
"""

from __future__ import annotations

import functools

import numpy as np
import scipy.fft

SCALES = 2  # J
ORIENTATIONS = 8  # L
GROUPS = 27
EPSILON = 1e-5  # added to the variance of a group


def num_channels(scales: int = SCALES, orientations: int = ORIENTATIONS) -> int:
    """Channels for each channel of a picture: 1 + J·L + L²·J·(J − 1)/2.

    >>> num_channels()
    81
    """
    return 1 + scales * orientations + orientations**2 * scales * (scales - 1) // 2


def features(images: np.ndarray, groups: int = GROUPS) -> np.ndarray:
    """Normalized scattering features of each picture.

    Args:
      images: [B, H, W, C], H and W multiples of 4.
      groups: The number of groups of `normalize_groups`.

    Returns:
      [B, C·81·H/4·W/4]. They are the channels of the first color, then those of the next.

    >>> features(np.zeros([2, 28, 28, 1])).shape
    (2, 3969)
    """
    return normalize_groups(_scatter_colors(images), groups).reshape(len(images), -1)


def mirrored_features(images: np.ndarray) -> np.ndarray:
    """Features that are the same for a picture and its mirror image, left and right exchanged.

    The square roots of both pictures' coefficients are averaged; a negative number keeps its sign.
    Roots keep large coefficients from outweighing the others. The right half of the columns is left
    out, since it repeats the left half, apart from a shift of 2^J - 1 pixels.

    Args:
      images: [B, H, W, C], H a multiple of 4 and W of 8.

    Returns:
      [B, C·81·H/4·W/8], not normalized, in the order of `features`.

    >>> mirrored_features(np.zeros([2, 32, 32, 3])).shape
    (2, 7776)
    """
    if images.shape[2] % (2 * 2**SCALES):
        raise ValueError(
            f"`images` must have a width that is a multiple of {2 * 2**SCALES}, so that their "
            f"features have a middle. Received: shape {images.shape}"
        )
    both = [_scatter_colors(images), _scatter_colors(images[:, :, ::-1])]
    roots = [np.sign(channels) * np.sqrt(np.abs(channels)) for channels in both]
    mean = (roots[0] + roots[1]) / 2
    return mean[..., : mean.shape[-1] // 2].reshape(len(images), -1)


def _scatter_colors(images: np.ndarray) -> np.ndarray:
    """[B, C·81, H/4, W/4]: the channels of the first color, then those of the next."""
    batch, height, width, colors = images.shape
    channels = scatter(np.moveaxis(images, -1, 1).reshape(batch * colors, height, width))
    return channels.reshape(batch, -1, *channels.shape[2:])


def normalize_groups(channels: np.ndarray, groups: int = GROUPS) -> np.ndarray:
    """Group normalization without weights: every group of each example gets mean 0 and variance 1.

    Unlike normalization by the statistics of a data set, it needs no private release.

    Args:
      channels: [B, K, h, w].
      groups: A divisor of K. A group consists of consecutive channels.

    Raises:
      ValueError: If `groups` does not divide the number of channels.
    """
    if channels.shape[1] % groups:
        raise ValueError(
            "`groups` must divide the number of channels. Received: "
            f"groups={groups!r}, {channels.shape[1]} channels"
        )
    grouped = channels.reshape(len(channels), groups, -1)
    grouped = grouped - grouped.mean(-1, keepdims=True)
    grouped /= np.sqrt(np.mean(grouped**2, -1, keepdims=True) + EPSILON)
    return grouped.reshape(channels.shape)


def scatter(
    images: np.ndarray, scales: int = SCALES, orientations: int = ORIENTATIONS
) -> np.ndarray:
    """The scattering coefficients of single-channel pictures.

    Pictures are mirrored at their edges. All convolutions are products in Fourier space, where
    `_subsample` also skips the pixels that a coarse wavelet does not need.

    Args:
      images: [B, H, W], H and W multiples of 2^J.
      scales: J. The scales are 1, 2, …, 2^(J − 1) pixels.
      orientations: L, the number of directions within half a turn.

    Returns:
      [B, `num_channels`, H/2^J, W/2^J], float32: the mean, then one wavelet, then two.

    Raises:
      ValueError: If H or W is not a multiple of 2^J.
    """
    step = 2**scales
    if images.ndim != 3 or images.shape[1] % step or images.shape[2] % step:
        raise ValueError(
            f"`images` must be [B, H, W] with H and W multiples of {step}; pad or crop them. "
            f"Received: shape {images.shape}"
        )
    margin = ((0, 0), (step, step), (step, step))
    spectrum = scipy.fft.fft2(np.pad(images.astype(np.float32), margin, mode="reflect"))
    wavelets, window = filter_bank(*spectrum.shape[1:], scales, orientations)

    def averaged(spectrum: np.ndarray, scale: int) -> np.ndarray:
        """⋆ φ, for a picture of which every 2^scale-th pixel is left."""
        product = spectrum * _coarse(window, scale)
        return scipy.fft.ifft2(_subsample(product, scales - scale)).real[:, 1:-1, 1:-1]

    def modulus(spectrum: np.ndarray, scale: int, wavelet: np.ndarray, its_scale: int):
        """The spectrum of |⋆ ψ|, of which every 2^its_scale-th pixel is left."""
        product = spectrum * _coarse(wavelet, scale)
        return scipy.fft.fft2(np.abs(scipy.fft.ifft2(_subsample(product, its_scale - scale))))

    first, second = [], []
    for scale, wavelet in wavelets:
        once = modulus(spectrum, 0, wavelet, scale)
        first.append(averaged(once, scale))
        for next_scale, next_wavelet in wavelets:
            if next_scale > scale:
                twice = modulus(once, scale, next_wavelet, next_scale)
                second.append(averaged(twice, next_scale))
    return np.stack([averaged(spectrum, 0), *first, *second], axis=1)


@functools.lru_cache(maxsize=4)
def filter_bank(
    height: int, width: int, scales: int, orientations: int
) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
    """The wavelets and the window, as real functions on the frequencies of a discrete transform.

    Wavelets are Morlet's: a plane wave of frequency 3π/4 at the finest scale under a Gaussian of
    standard deviation 0.8 along the wave and 0.4·L/2 across, minus as much of the Gaussian as
    makes the mean zero. Each next scale is twice as wide. The window is a Gaussian.

    Returns:
      Pairs of a scale j and a wavelet, the finest scale first; and the window.
    """
    wavelets = []
    for scale in range(scales):
        for turn in range(orientations):
            angle = (orientations // 2 - 1 - turn) * np.pi / orientations
            shape = (height, width, 0.8 * 2**scale, 4 / orientations, angle)
            wave = _gaussian(*shape, frequency=0.75 * np.pi / 2**scale)
            still = _gaussian(*shape, frequency=0.0)
            wavelet = wave - still * (wave[0, 0] / still[0, 0])
            wavelets.append((scale, wavelet.astype(np.float32)))
    window = _gaussian(height, width, 0.8 * 2 ** (scales - 1), 1.0, 0.0, 0.0)
    return wavelets, window.astype(np.float32)


def _gaussian(
    height: int, width: int, deviation: float, slant: float, angle: float, frequency: float
) -> np.ndarray:
    """The discrete Fourier transform of a Gaussian, times a plane wave, around pixel (0, 0).

    The transform of a sampled function has the period 2π, so it is the sum of all translates of
    the continuous one, which is a Gaussian too. More than two periods away nothing is left of it.
    """
    down, right = (
        2 * np.pi * (np.fft.fftfreq(size) + np.arange(-2, 3)[:, None]) for size in (height, width)
    )
    down, right = down[:, None, :, None], right[None, :, None, :]
    along = np.cos(angle) * down + np.sin(angle) * right
    across = np.cos(angle) * right - np.sin(angle) * down
    exponents = deviation**2 * ((along - frequency) ** 2 + (across / slant) ** 2)
    return np.exp(-exponents / 2).sum((0, 1))


def _coarse(transfer: np.ndarray, scale: int) -> np.ndarray:
    """A filter for pictures of which every 2^scale-th pixel is left: its low frequencies."""
    rows, columns = (
        np.fft.fftfreq(size >> scale, 1 / (size >> scale)).astype(int) for size in transfer.shape
    )
    return transfer[np.ix_(rows, columns)]


def _subsample(spectra: np.ndarray, octaves: int) -> np.ndarray:
    """The spectra after all but every 2^octaves-th pixel are dropped: means of their aliases."""
    step, (batch, height, width) = 2**octaves, spectra.shape
    return spectra.reshape(batch, step, height // step, step, width // step).mean((1, 3))
