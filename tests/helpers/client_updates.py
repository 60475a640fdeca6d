"""ADADP's client update in NumPy, and a linear model to run it on."""

import numpy as np

LINEAR_DIMENSION = 3


def numpy_adadp(
    theta,
    gradients,
    eta=0.1,
    tolerance=0.3,
    alpha_min=0.9,
    alpha_max=1.1,
    discard=False,
    keep="half_steps",
    shorten=True,
):
    """Algorithm 1 of the supplement, step by step as it is printed there; and steps made shorter.

    Args:
      theta: where to begin, [d].
      gradients: for each minibatch a function of θ; a last one without a partner moves θ by half a
        step.

    Returns:
      θ after each minibatch, and a dict: the final `eta`, `judged`, `discarded`, `errors`.
    """
    theta = np.asarray(theta, np.float64)
    points, errors, discarded = [], [], 0
    for first, second in zip(gradients[::2], [*gradients[1::2], None]):
        g1 = first(theta)
        middle = theta - eta / 2 * g1
        hat = theta - eta * g1
        points.append(middle)
        if second is None:
            break
        tilde = middle - eta / 2 * second(middle)
        with np.errstate(invalid="ignore"):
            error = np.sqrt(np.sum(((tilde - hat) / np.maximum(1, np.abs(tilde))) ** 2))
        errors.append(error)
        end = tilde if keep == "half_steps" else hat
        if error <= tolerance or not (discard or shorten):
            theta = end
        elif discard or not np.isfinite(error):
            discarded += 1
        else:
            theta = theta + tolerance / error * (end - theta)
        with np.errstate(divide="ignore"):
            ratio = tolerance / error if np.isfinite(error) else 0.0
        eta = eta * min(max(ratio, alpha_min), alpha_max)
        points.append(theta)
    return points, {"eta": eta, "judged": len(errors), "discarded": discarded, "errors": errors}


def linear_data(num_batches, batch_size, seed, scale=1.0):
    """x [N, 3] and y [N, 1] of a linear model, split into batches."""
    rng = np.random.default_rng(seed)
    shape = (num_batches * batch_size, LINEAR_DIMENSION)
    x = (scale * rng.normal(size=shape)).astype(np.float32)
    y = (x @ [[1.0], [-2.0], [0.5]] + 0.3).astype(np.float32)
    return [(x[k : k + batch_size], y[k : k + batch_size]) for k in range(0, len(x), batch_size)]


def linear_gradient(batch):
    """The gradient of the mean squared error of x·w + b, a function of (w, b)."""
    x, y = (np.asarray(part, np.float64) for part in batch)

    def gradient(theta):
        error = x @ theta[:-1] + theta[-1] - y[:, 0]
        return 2 * np.append(x.T @ error, error.sum()) / len(x)

    return gradient
