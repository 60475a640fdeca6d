"""Packaging of tf_adaptive_dp; settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "tf_adaptive_dp" / "version.py").read_text(encoding="utf-8")
).group(1)

setup(
    name="tf-adaptive-dp",
    version=VERSION,
    description="Adaptive optimizers with differential privacy for Keras and TensorFlow Federated",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["tf_adaptive_dp*", "federated*"]),
    # Says "everything lies in this directory", so that an editable install is one path entry and
    # finds packages that are added later.
    package_dir={"": "."},
    python_requires=">=3.9,<3.12",
    # Bounds for ordinary pip resolution. `make` uses exact versions: requirements/lock.txt.
    install_requires=[
        # The optimizers build on Keras 2's Optimizer and on the graphs of this release.
        "tensorflow>=2.14.1,<2.15",
        "tensorflow-privacy>=0.9.0,<0.10",
        "dp-accounting>=0.4.3,<0.5",
        "numpy>=1.23.5,<2",
        # The `tensorboard` command of 2.14 imports pkg_resources, which left setuptools with 82;
        # from 80.9 on it greets with a warning.
        "setuptools<80.9",
    ],
    extras_require={
        # TFF wants jaxlib==0.4.14, which PyPI has no more, so pip refuses this extra. It is here
        # to name the version; requirements/lock.txt installs it.
        "federated": ["tensorflow-federated==0.87.0"],
        # tensorflow-metadata 1.14 to 1.17.0 want protobuf < 4.22 below Python 3.11; the newest
        # (1.21) accepts TensorFlow 2.14's protobuf 4 and then fails to import beside it.
        "datasets": ["tensorflow-datasets>=4.9.3,<4.9.5", "tensorflow-metadata==1.13.1"],
        "tuning": ["keras-tuner>=1.4.8,<1.5"],
        "plots": ["matplotlib"],
        # Beside "datasets", for examples/experiments; TF Privacy brings TensorFlow Probability.
        "experiments": ["matplotlib", "tqdm", "tensorflow-probability>=0.22.1,<0.23"],
        # The attacks of `membership_inference`; their package asks for tf-models-official and 60
        # more, of which they import none: pip install --no-deps tensorflow-empirical-privacy==0.1.0
        "attacks": ["scikit-learn<1.7", "pandas<2", "immutabledict", "statsmodels>=0.14.0,<0.15"],
        "dev": ["hypothesis", "pytest", "pytest-xdist", "ruff"],
    },
)
