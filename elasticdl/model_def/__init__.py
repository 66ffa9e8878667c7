"""From the flags that name a model definition to its callables."""

from elasticdl.model_def.definition import ModelDefinition
from elasticdl.model_def.loading import load, load_model_definition

__all__ = ["ModelDefinition", "load", "load_model_definition"]
