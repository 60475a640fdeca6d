"""The report of a training run: one page to hand over, also as a model-card section and as JSON."""

from __future__ import annotations

import html
import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_adaptive_dp._keras.generation import keras, keras_version
from tf_adaptive_dp.accounting import composition
from tf_adaptive_dp.accounting.ledger import is_chosen_by_search
from tf_adaptive_dp.durable import files
from tf_adaptive_dp.sampling import sampling_epsilon
from tf_adaptive_dp.sampling.draws import Sampling
from tf_adaptive_dp.statement import noise_is_seeded, num_unchecked, privacy_statement, unit_of
from tf_adaptive_dp.version import __version__
from tf_adaptive_dp.wording import counted, format_delta, format_epsilon

__all__ = ["facts", "write"]

# Settings of ADADP that act only after `freeze_learning_rate_after`.
_OF_FREEZING = ("decay_after_freeze", "steps_per_epoch")
# Which of an optimizer's settings the report leaves out: the statement has what was released.
_LEFT_OUT = (
    "chosen_by_search",
    "fewest_units",
    "ledger",
    "ledger_checks",
    "name",
    "other_releases",
    "seed",
)

# The figures that were computed from raw gradients, and what they are.
_NOT_PRIVATE = {
    "clipped_share": "share of examples that were clipped",
    "gradient_norm_quantile_0.5": "median norm of the gradients",
}


def facts(
    optimizer: Any,
    num_examples: int,
    delta: float,
    *,
    history: Sequence[Mapping[str, Any]] = (),
    epsilon: float | None = None,
    sampling: Sampling | str = "shuffled",
    accountant: str = "rdp",
    model: keras.Model | None = None,
    audit: Any = None,
    test_metric: str | None = None,
) -> dict[str, Any]:
    """What the report of a run says, as values for JSON; `write` makes files of it.

    These are the privacy statement, ε by step against the budget, the test metric, the learning
    rate, how the batches were drawn and what was verified of it, the model, and the versions.

    Guarantee: ε and the statement are those of `privacy_statement`. It does not cover `history`,
    which is `history_NOT_PRIVATE` in the result: its `figures` were computed from gradients without
    noise, and losses and metrics in its `logs` from examples without noise. If you publish the
    report, leave them out of what you pass.

    Args:
      optimizer: the private optimizer of the run.
      num_examples: the number of examples in the training set; of users, if the sampling draws
        users.
      delta: δ.
      history: the rows of a `RunHistory`: dictionaries with `epoch`, `releases`, `logs`, `figures`.
      epsilon: the budget, if there was one.
      sampling: how the batches were drawn, see `privacy_statement`.
      accountant: `"pld"` or `"rdp"`.
      model: the trained model.
      audit: what an audit proved: a `OneRunReport`, a `ManyRunReport`, or a `PrivacyAudit` after
        training.
      test_metric: the metric to show, one of validation data, whose name begins with `val_`; by
        default the first one.

    Raises:
      TypeError, ValueError: as `privacy_statement`; or if the history has no such metric, or it is
        one of the training data.

    Example:
      >>> import tf_adaptive_dp
      >>> optimizer = tf_adaptive_dp.ADADP(1.0, 2.0, expected_batch_size=100)
      >>> optimizer.ledger.restore([(2.0, 100.0, 500)], [(500, 0, 0, 0.0)])
      >>> data = facts(optimizer, 10_000, 1e-5, sampling="poisson")
      >>> data["optimizer"]["class"], data["sampling"]["releases"]
      ('ADADP', 500)
    """
    spent = sampling_epsilon.epsilon_spent(
        sampling, optimizer, num_examples, delta, accountant=accountant
    )
    statement = privacy_statement(
        optimizer, num_examples, delta, sampling=sampling, accountant=accountant
    )
    with_checks = composition.checks_of(optimizer, num_examples, correlated=True)
    releases = sum(segment.num_releases for segment, _ in with_checks)
    unchecked = num_unchecked(optimizer, num_examples, sampling)
    report = getattr(audit, "report", audit)
    weights = [] if model is None else model.trainable_variables
    figures = {
        "privacy": {
            "epsilon": spent,
            "delta": delta,
            "budget": epsilon,
            "accountant": accountant,
            "unit": unit_of(sampling).one,
            "num_examples": num_examples,
            "seeded_noise": noise_is_seeded(optimizer),
            "chosen_by_search": is_chosen_by_search(optimizer),
            "statement": statement,
        },
        "sampling": {
            "kind": sampling_epsilon.label_of(sampling),
            "settings": repr(sampling),
            "releases": releases,
            "checked": min(sum(known.checked for _, known in with_checks), releases - unchecked),
            "repeated": sum(known.repeated for _, known in with_checks),
        },
        "optimizer": {"class": type(optimizer).__name__, **_settings(optimizer)},
        "model": None
        if model is None
        else {
            "name": model.name,
            "trainable_weights": sum(int(np.prod(w.shape)) for w in weights),
            "noise_to_signal": optimizer.noise_to_signal(weights),
        },
        "test_metric": _test_metric(history, test_metric),
        "history_NOT_PRIVATE": [dict(row) for row in history],
        "audit": None if report is None else report._asdict(),
        "versions": {
            "tf_adaptive_dp": __version__,
            "tensorflow": tf.__version__,
            "keras": keras_version(),
            "dp-accounting": metadata.version("dp-accounting"),
            "python": platform.python_version(),
        },
    }
    return _for_json(figures)


def write(path: str | os.PathLike, data: Mapping[str, Any]) -> None:
    """Writes the report of a run as an HTML page, as Markdown for a model card, and as JSON.

    The page needs no other file and loads nothing from elsewhere. It marks the figures that are not
    private. The JSON file has all of the history under `history_NOT_PRIVATE`.

    Guarantee: that of `facts`; the page holds no other data.

    Args:
      path: the page; `.md` and `.json` files of the same name are written beside it.
      data: the result of `facts`.

    Raises:
      ValueError: if the page would have the name of one of the two other files.

    Example:
      >>> import tempfile
      >>> import tf_adaptive_dp
      >>> optimizer = tf_adaptive_dp.ADADP(1.0, 2.0, expected_batch_size=100)
      >>> optimizer.ledger.restore([(2.0, 100.0, 500)], [(500, 0, 0, 0.0)])
      >>> folder = Path(tempfile.mkdtemp())
      >>> write(folder / "report.html", facts(optimizer, 10_000, 1e-5, sampling="poisson"))
      >>> sorted(path.name for path in folder.iterdir())
      ['report.html', 'report.json', 'report.md']
    """
    path = Path(path)
    if path.suffix in (".json", ".md"):
        raise ValueError(
            "`path` must be that of the HTML page; the Markdown and the JSON file are written "
            f"beside it. Pass {str(path.with_suffix('.html'))!r}. Received: path={str(path)!r}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    beside = path.with_suffix("") if path.suffix in (".html", ".htm") else path  # or "v1.2"
    files.write(beside.with_name(f"{beside.name}.json"), text.encode())
    files.write(beside.with_name(f"{beside.name}.md"), model_card(data).encode())
    files.write(path, page(data).encode())


def _settings(optimizer: Any) -> dict[str, Any]:
    """The public settings of an optimizer."""
    try:
        config = optimizer.get_config()
    except ValueError:  # events that Keras cannot save; the statement names them
        config = {
            name: getattr(optimizer, name)
            for name in ("l2_norm_clip", "noise_multiplier", "expected_batch_size")
        }
    unused = _OF_FREEZING if config.get("freeze_learning_rate_after") is None else ()
    return {
        name: value if isinstance(value, (bool, int, float, str)) else repr(value)
        for name, value in config.items()
        if value is not None and name not in _LEFT_OUT and name not in unused
    }


def _test_metric(history: Sequence[Mapping[str, Any]], asked: str | None) -> str | None:
    """The metric to show: the one asked for, or the first one of the validation data."""
    names = [
        name
        for row in history
        for name, value in row["logs"].items()
        if name.startswith("val_") and isinstance(value, (int, float))
    ]
    if asked is not None:
        if asked not in names:
            raise ValueError(
                "`test_metric` must be a metric of the history that is one number, was computed "
                "from validation data, and begins with 'val_'. Metrics of the training data are "
                "not private, and the report shows the metric beside figures that are. Pass "
                f"`validation_data` to `fit`. Received: test_metric={asked!r}; there are "
                + (", ".join(dict.fromkeys(names)) or "none")
            )
        return asked
    return next((name for name in names if name != "val_loss"), names[0] if names else None)


def _for_json(value: Any) -> Any:
    """The same nest with NumPy's numbers as Python's, and infinity, which JSON lacks, as text."""
    if isinstance(value, Mapping):
        return {str(name): _for_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _unit(data: Mapping[str, Any]) -> str:
    """The unit of privacy."""
    return data["privacy"]["unit"]


def _epsilon(data: Mapping[str, Any]) -> str:
    """ε as the statement rounds it."""
    spent = float(data["privacy"]["epsilon"])
    if math.isinf(spent):
        return "infinite: NOT PRIVATE"
    text = format_epsilon(spent)
    if data["privacy"]["chosen_by_search"]:
        text += " for this training alone, without the search that chose the model"
    if data["privacy"]["seeded_noise"]:
        text += ": NOT PRIVATE, the noise had a seed"
    return text


def _verified(sampling: Mapping[str, Any]) -> tuple[str, str]:
    """For how many releases the library saw that the batch was the right one, with a name."""
    name, again = "batches verified as fresh draws", sampling["repeated"]
    if sampling["kind"] == "fixed_order":  # each pass repeats them, as it should
        name, again = "batches verified to come in their order", 0
    return name, f"{max(sampling['checked'] - again, 0)} of {sampling['releases']}"


def _rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table of the report: names and values."""
    sampling, privacy = data["sampling"], data["privacy"]
    rows = [
        ("epsilon", _epsilon(data)),
        ("delta", format_delta(privacy["delta"])),
        ("budget", "none" if privacy["budget"] is None else f"epsilon = {privacy['budget']:g}"),
        (f"training {_unit(data)}s", str(privacy["num_examples"])),
        ("unit of privacy", f"one {_unit(data)}"),
        ("accounting", privacy["accountant"].upper()),
        ("sampling", sampling["kind"]),
        _verified(sampling),
    ]
    if data["test_metric"]:
        rows.append((data["test_metric"], f"{_series(data, data['test_metric'])[1][-1]:.4g}"))
    audit = data["audit"]
    if audit:
        rows.append(
            (
                "audit: epsilon is at least",
                f"{audit['epsilon_lower_bound']:.3g} with probability {audit['confidence']:g}",
            )
        )
    if data["model"]:
        rows.append(("model", data["model"]["name"]))
        rows.append(("trainable weights", str(data["model"]["trainable_weights"])))
        if data["model"]["noise_to_signal"] is not None:
            ratio = f"{data['model']['noise_to_signal']:.3g}"
            rows.append(("norm of a step's noise / largest norm of its signal", ratio))
    rows += [(f"optimizer: {name}", str(v)) for name, v in data["optimizer"].items()]
    rows += [(f"version: {name}", str(v)) for name, v in data["versions"].items()]
    return rows


def _series(data: Mapping[str, Any], name: str, part: str = "logs") -> tuple[list, list[float]]:
    """The releases after each epoch, and a value of each."""
    known = [row for row in data["history_NOT_PRIVATE"] if name in row[part]]
    return [row["releases"] for row in known], [float(row[part][name]) for row in known]


def model_card(data: Mapping[str, Any]) -> str:
    """The report as a section of a model card, in Markdown.

    Args:
      data: the result of `facts`.
    """
    # Two spaces at the end of a line would break it, and a line of dashes would make a heading.
    statement = "\n".join(line.rstrip() for line in data["privacy"]["statement"].splitlines())
    cells = [(name, value.replace("|", "\\|")) for name, value in _rows(data)]
    table = "\n".join(f"| {name} | {value} |" for name, value in cells)
    return f"## Privacy\n\n{statement}\n\n| | |\n| --- | --- |\n{table}\n"


def page(data: Mapping[str, Any]) -> str:
    """The report as an HTML page that needs no other file.

    Args:
      data: the result of `facts`.
    """
    paragraphs = data["privacy"]["statement"].strip().split("\n\n")
    statement = "".join(map(_paragraph, paragraphs))
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in _rows(data)
    )
    private, not_private = _charts(data)
    raw = not_private and (
        '<section class="raw"><h2>Not private</h2><p>These figures were computed from gradients '
        "without noise. Epsilon does not cover them: do not publish them.</p>"
        f'<div class="charts">{not_private}</div></section>'
    )
    charts = private and (
        f'<section><h2>Training</h2><div class="charts">{private}</div></section>'
    )
    return _PAGE.format(
        epsilon=html.escape(_epsilon(data)),
        delta=format_delta(data["privacy"]["delta"]),
        releases=counted(data["sampling"]["releases"], "noisy gradient"),
        examples=counted(data["privacy"]["num_examples"], _unit(data)),
        statement=statement,
        charts=charts,
        raw=raw,
        rows=rows,
    )


def _paragraph(text: str) -> str:
    """A paragraph of the statement, with its list if it has one, without line breaks."""
    first, *items = (html.escape(" ".join(part.split())) for part in text.split("\n  - "))
    listed = "".join(f"<li>{item}</li>" for item in items)
    return f"<p>{first}</p>" + (listed and f"<ul>{listed}</ul>")


def _charts(data: Mapping[str, Any]) -> tuple[str, str]:
    """The charts of private figures, and those of others, as SVG."""
    budget = data["privacy"]["budget"]
    private = [_chart("epsilon", *_series(data, "epsilon"), limit=budget)]
    if data["test_metric"]:
        private.append(_chart(data["test_metric"], *_series(data, data["test_metric"])))
    private.append(_chart("learning rate", *_series(data, "learning_rate"), log=True))
    raw = [_chart(title, *_series(data, n, "figures")) for n, title in _NOT_PRIVATE.items()]
    return "".join(private), "".join(raw)


def _chart(
    title: str,
    steps: Sequence[int],
    values: Sequence[float],
    limit: float | None = None,
    log: bool = False,
) -> str:
    """A small chart as inline SVG, or nothing if there is nothing to show."""
    if not any(map(math.isfinite, values)):
        return ""
    import matplotlib  # takes a while
    from matplotlib.figure import Figure

    # The same figures make the same page.
    settings = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(3.6, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, values, marker="." if len(steps) < 30 else None, color="#1a5fb4")
        if limit is not None:
            axes.axhline(limit, color="#a51d2d", linestyle="--", linewidth=1, label="budget")
            axes.legend(frameon=False)
            axes.set_ylim(bottom=0)
        if log and any(value > 0 for value in values):  # a rate of 0 has no logarithm
            axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("noisy gradients")
        axes.grid(alpha=0.3)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    description = f'<svg role="img" aria-label="{html.escape(title)} by noisy gradients" '
    return f"<figure>{description}{svg[len('<svg ') :]}</figure>"


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Privacy report</title>
<style>
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem;
         color: #1c1c1c; background: #fff; }}
  h1 {{ margin-bottom: 0; }}
  .key {{ display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1rem 0; }}
  .key div {{ font-size: 1.6rem; font-weight: 600; }}
  .key span {{ display: block; font-size: .85rem; font-weight: 400; color: #555; }}
  section {{ margin-top: 2rem; }}
  .statement {{ overflow-wrap: anywhere; }}
  .charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr));
            gap: 1rem; }}
  figure {{ margin: 0; }}
  svg {{ width: 100%; height: auto; }}
  .raw {{ border: 2px solid #a51d2d; border-radius: .5rem; padding: 0 1rem 1rem; }}
  table {{ border-collapse: collapse; width: 100%; }}
  th, td {{ text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
           border-bottom: 1px solid #ddd; overflow-wrap: anywhere; }}
  th {{ font-weight: 400; color: #555; width: 40%; }}
  @media print {{ body {{ max-width: none; padding: 0; font-size: 11pt; }}
    section, figure, tr {{ break-inside: avoid; }} }}
</style>
</head>
<body>
<h1>Privacy report</h1>
<div class="key">
  <div>{epsilon}<span>epsilon, for each of {examples}</span></div>
  <div>{delta}<span>delta</span></div>
  <div>{releases}<span>released</span></div>
</div>
<section class="statement"><h2>Statement</h2>{statement}</section>
{charts}
{raw}
<section><h2>Run</h2><table>{rows}</table></section>
</body>
</html>
"""
