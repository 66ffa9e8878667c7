"""docs/callbacks.md: its code runs, and what its table says of Keras's callbacks is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import pytest

from elasticdl.frameworks.keras import optimizer as of_keras
from elasticdl.frameworks.torch import optimizer as of_torch
from elasticdl_client.errors import ModelDefinitionError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "callbacks.md").read_text()
METRICS = {"accuracy": True, "loss": False}


def made_by(block: str) -> Any:
    scope: dict[str, Any] = {"keras": keras}
    exec(block, scope)
    return scope["callbacks"]


def test_the_code_of_the_page_runs() -> None:
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    rules = of_keras.rules_of("m.py", of_keras.make_callbacks("m.py", made_by(first)), METRICS)
    assert (rules.stopping[0]["metric"], rules.saving[0]["path"]) == ("accuracy", "best.keras")
    made = of_torch.make_callbacks("m.py", made_by(second))
    assert of_torch.rules_of("m.py", made, METRICS).stopping[0]["maximize"] is False
    assert of_torch.has(made, "on_evaluation_end")
    assert not of_torch.has(made, "on_epoch_end")


ARGUMENTS = {
    "BackupAndRestore": ("a",),
    "CSVLogger": ("a",),
    "ModelCheckpoint": ("a.keras",),
    "LearningRateScheduler": (lambda epoch: 0.1,),
    "OrbaxCheckpoint": ("a",),
}


@pytest.mark.parametrize(
    "name", [name for name in dir(keras.callbacks) if name[0].isupper() and name != "CallbackList"]
)
def test_every_callback_of_keras_works_or_is_refused_by_name(name: str) -> None:
    try:
        callback = getattr(keras.callbacks, name)(*ARGUMENTS.get(name, ()))
    except ImportError:  # of a package that is not here
        pytest.skip(f"{name} cannot be made here")
    works = {
        "Callback",
        "EarlyStopping",
        "LambdaCallback",
        "LearningRateScheduler",
        "ModelCheckpoint",
        "TerminateOnNaN",
    }
    if name in works:
        assert of_keras.make_callbacks("m.py", lambda: [callback]) == [callback]
        assert name == "Callback" or f"`{name}`" in PAGE
    else:
        with pytest.raises(ModelDefinitionError, match=f"the callback {name} has no place in a distributed job"):
            of_keras.make_callbacks("m.py", lambda: [callback])


def test_a_callback_that_is_derived_from_a_refused_one_is_refused_as_that_one() -> None:
    class Slower(keras.callbacks.ReduceLROnPlateau):  # type: ignore[misc]
        pass

    class Stops(keras.callbacks.EarlyStopping):  # type: ignore[misc]
        pass

    with pytest.raises(ModelDefinitionError, match="the callback Slower, a ReduceLROnPlateau, has no place"):
        of_keras.make_callbacks("m.py", lambda: [Slower()])
    stops = Stops()
    assert of_keras.make_callbacks("m.py", lambda: [stops]) == [stops]


def test_hooks_given_as_functions_are_called_and_others_are_refused() -> None:
    told: list[Any] = []
    good = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append((epoch, logs)))
    made = of_keras.make_callbacks("m.py", lambda: [good])
    of_keras.call(made, "on_epoch_end", (3, {"loss": 1.0}), keras.Sequential(), {})
    assert told == [(3, {"loss": 1.0})]
    bad = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    with pytest.raises(ModelDefinitionError, match="LambdaCallback has on_train_batch_end, which no worker calls"):
        of_keras.make_callbacks("m.py", lambda: [bad])
