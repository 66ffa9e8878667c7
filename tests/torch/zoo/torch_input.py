"""A feed for processes: samples of several parts, with chance of three kinds; some records do harm."""

import os
import random
import signal
import threading
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate


def custom_model() -> nn.Module:
    return nn.Linear(1, 10)


def feed(records: list[bytes], mode: str, metadata: Any) -> Any:
    for record in records:
        text = record.decode()
        if text == "raise":
            raise ValueError("no such picture")
        if text == "reset":
            raise ConnectionResetError(104, "Connection reset by peer")
        if text == "raise at length":
            raise ValueError("图" * 30_000)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "exit":
            os._exit(3)
        if text == "block":
            threading.Event().wait()
        noise = torch.rand(2, 3, dtype=torch.float64).T, np.float32(np.random.rand()), random.random()
        features = {"text": text, "noise": noise, "length": len(text)}
        yield features if mode == "prediction" else (features, len(text) % 2)


def collate_fn(samples: list[Any]) -> Any:
    made = default_collate(samples)
    features = made[0] if isinstance(made, list) else made
    features["by_text"] = {text: np.full((2, 2), number) for number, text in enumerate(features["text"])}
    if "lock" in features["text"]:
        features["guard"] = [threading.Lock()]
    return made
