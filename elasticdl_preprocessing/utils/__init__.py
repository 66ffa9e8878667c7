"""The statistics under the import path of the original ElasticDL: `elasticdl_preprocessing.utils.analyzer_utils`."""

import sys

from elasticdl_preprocessing import analyzer as analyzer_utils

__all__ = ["analyzer_utils"]

sys.modules[f"{__name__}.analyzer_utils"] = analyzer_utils
