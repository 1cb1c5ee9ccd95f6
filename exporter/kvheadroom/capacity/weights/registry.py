"""Every architecture whose weights can be written down from its config.json."""

from collections.abc import Mapping

from kvheadroom.capacity.weights import multimodal
from kvheadroom.capacity.weights.builders import Build

BUILDS: Mapping[str, Build] = {**multimodal.TEXT_BUILDS, **multimodal.BUILDS}
