"""What TensorBoard shows of a private run, in the order in which it should be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# TensorBoard sorts groups by name and opens the first: "privacy" comes before all others here.
PRIVACY = "privacy"
RAW = "raw_gradients_NOT_PRIVATE"
STEP_SIZE = "step_size"


class TensorBoardLog:
    """Writes the figures of a run, the layout that shows them together, and its public settings.

    Tags say what is private: those that end in `NOT_PRIVATE`, or whose group does, must not be
    published.

    Args:
      log_dir: the directory for TensorBoard's files.
      settings: the public settings of the run, for TensorBoard's page "HParams".
    """

    def __init__(self, log_dir: str | os.PathLike, settings: Mapping[str, Any]):
        self._writer = tf.summary.create_file_writer(str(log_dir))
        with self._writer.as_default(step=0):
            for described in (_layout(), *_settings(settings)):
                tf.summary.experimental.write_raw_pb(described.SerializeToString())

    def write(
        self,
        epoch: int,
        privacy: Mapping[str, float],
        not_private: Mapping[str, float],
        step_size: Mapping[str, float],
    ) -> None:
        """Writes the figures of an epoch.

        Args:
          epoch: its number.
          privacy: figures that are public or private.
          not_private: statistics of raw gradients.
          step_size: figures of an optimizer that adapts its learning rate, which are private.
        """
        scalars = {f"{PRIVACY}/{name}": value for name, value in privacy.items()}
        for name, value in not_private.items():
            scalars[f"{RAW}/{name}"] = value
        # It says whether the clip norm is right. Cards are sorted by name too: it is the last.
        scalars[f"{PRIVACY}/share_clipped_NOT_PRIVATE"] = not_private["clipped_share"]
        scalars.update({f"{STEP_SIZE}/{name}": value for name, value in step_size.items()})
        with self._writer.as_default(step=epoch):
            for tag, value in scalars.items():
                tf.summary.scalar(tag, value)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _layout() -> Any:
    """The page "Custom scalars": charts of several figures each."""
    # Imported here: only a run that is logged needs TensorBoard's plugins.
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.custom_scalar import summary as custom_scalars

    def chart(title: str, *tags: str) -> Any:
        patterns = [f"^{tag}$" for tag in tags]
        lines = layout_pb2.MultilineChartContent(tag=patterns)
        return layout_pb2.Chart(title=title, multiline=lines)

    privacy = [
        chart("ε against the budget", f"{PRIVACY}/epsilon", f"{PRIVACY}/epsilon_budget"),
        chart("learning rate", f"{PRIVACY}/learning_rate"),
        chart("noise / largest signal", f"{PRIVACY}/noise_to_signal"),
    ]
    raw = [
        chart("share of clipped gradients", f"{RAW}/clipped_share"),
        chart("quantiles of gradient norms", f"{RAW}/gradient_norm_quantile_.*"),
    ]
    categories = [
        layout_pb2.Category(title="Privacy", chart=privacy),
        layout_pb2.Category(title="NOT PRIVATE: raw gradients", chart=raw),
    ]
    return custom_scalars.pb(layout_pb2.Layout(category=categories))


def _settings(settings: Mapping[str, Any]) -> list[Any]:
    """The page "HParams": the settings, and ε as the figure that belongs to them."""
    from tensorboard.plugins.hparams import api

    known = {name: value for name, value in settings.items() if value is not None}
    metrics = [
        api.Metric(f"{PRIVACY}/epsilon", display_name="ε"),
        api.Metric(f"{PRIVACY}/learning_rate", display_name="learning rate at the end"),
    ]
    return [
        api.hparams_config_pb(hparams=[api.HParam(name) for name in known], metrics=metrics),
        api.hparams_pb(known),
    ]
