"""The benchmarked engines and their environments. Pure data."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Family:
    """Engines of one framework.

    Args:
      module: The module that makes its engines.
      packages: The distributions whose versions are recorded.
      environment: The folder of an environment, from the top of the repository; `None` takes the
        caller's.
      variables: Environment variables that its workers need.
    """

    module: str
    packages: tuple[str, ...]
    environment: str | None = None
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    def python(self) -> pathlib.Path:
        """The interpreter of its workers, which may not exist."""
        if self.environment is None:
            return pathlib.Path(sys.executable)
        return ROOT / self.environment / "bin" / "python"


FAMILIES = {
    "tensorflow": Family(
        "benchmarks.steps.engines.tensorflow_engines",
        ("tensorflow", "keras", "tensorflow-privacy", "tf-adaptive-dp", "numpy"),
    ),
    "keras3": Family(
        "benchmarks.steps.engines.tensorflow_engines",
        ("tensorflow", "keras", "numpy"),
        environment=".venv-today",
        variables={"KERAS_BACKEND": "tensorflow"},
    ),
    "torch": Family(
        "benchmarks.steps.engines.torch_engines",
        ("torch", "opacus", "numpy"),
        environment="benchmarks/peers/opacus/.venv",
    ),
    "jax": Family(
        "benchmarks.steps.engines.jax_engines",
        ("jax", "jaxlib", "jax-privacy", "optax", "numpy"),
        environment="benchmarks/peers/jax_privacy/.venv",
    ),
    "jax_keras": Family(
        "benchmarks.steps.engines.jax_keras_engines",
        ("jax", "jaxlib", "keras", "jax-privacy", "numpy"),
        environment="benchmarks/peers/jax_privacy/.venv",
        variables={"KERAS_BACKEND": "jax"},
    ),
}

# Engine: its family and description. Engines that need much memory come last, see `measure.py`.
ENGINES = {
    "keras_sgd": ("tensorflow", "Keras SGD, not private"),
    "dpsgd": ("tensorflow", "tf_adaptive_dp.DPSGD"),
    "adadp": ("tensorflow", "tf_adaptive_dp.ADADP"),
    "untuned": ("tensorflow", "tf_adaptive_dp.UntunedSGD"),
    "dpsgd_delayed": ("tensorflow", "tf_adaptive_dp.DPSGD with a DelayedPreconditioner"),
    "adadps_fixed": ("tensorflow", "tf_adaptive_dp.AdaDPS with a FixedPreconditioner"),
    "adadps_public": (
        "tensorflow",
        "tf_adaptive_dp.AdaDPS with PublicGradients, refreshed each step",
    ),
    "dpadam": ("tensorflow", "tf_adaptive_dp.DPAdam"),
    "dpsgd_xla": ("tensorflow", "tf_adaptive_dp.DPSGD, `jit_compile=True`"),
    "dpsgd_secure": ("tensorflow", "tf_adaptive_dp.DPSGD, `secure_noise=True`"),
    "dpsgd_adaptive": ("tensorflow", 'tf_adaptive_dp.DPSGD, `clipping="adaptive"`'),
    "keras3_sgd": ("keras3", "Keras 3 SGD, not private"),
    "keras3_dpsgd": ("keras3", "tf_adaptive_dp.DPSGD on Keras 3"),
    "keras3_sgd_xla": ("keras3", "Keras 3 SGD, not private, `jit_compile=True`"),
    "keras3_dpsgd_xla": ("keras3", "tf_adaptive_dp.DPSGD on Keras 3, `jit_compile=True`"),
    "torch_sgd": ("torch", "PyTorch SGD, not private"),
    "jax_sgd": ("jax", "JAX SGD under jit, not private"),
    "jax_keras_sgd": ("jax_keras", "Keras 3 SGD on JAX, not private, compiled"),
    "opacus_ghost": ("torch", "Opacus, ghost clipping"),
    "tfp_fast": ("tensorflow", "TF Privacy DPModel with its fast clipping, without XLA"),
    "tfp_model": ("tensorflow", "TF Privacy DPModel as it comes, with XLA"),
    "tfp_model_no_xla": ("tensorflow", "TF Privacy DPModel without XLA"),
    "opacus": ("torch", "Opacus as it comes, per-sample gradients"),
    "jax_keras_private": ("jax_keras", "JAX-Privacy's Keras API on JAX, compiled"),
    "jax_privacy": ("jax", "JAX-Privacy clipped_grad under jit"),
    "materialized": ("tensorflow", '`tf_adaptive_dp.DPSGD(gradients="materialized")`'),
    "tfp_vectorized": ("tensorflow", "TF Privacy VectorizedDPKerasSGDOptimizer"),
}
PEERS = tuple(name for name, (family, _) in ENGINES.items() if family != "tensorflow")
OWN = tuple(name for name in ENGINES if name not in PEERS)


def family_of(engine: str) -> Family:
    """The family of an engine."""
    return FAMILIES[ENGINES[engine][0]]
