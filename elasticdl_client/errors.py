"""The one error tree: errors that a user sees and that are no bugs of ours."""

from __future__ import annotations


class ElasticDLError(Exception):
    """Something the user can mend.

    Printed without a traceback as ``what`` followed by ``hint``; every other exception is a bug and keeps its
    traceback.

    Attributes:
        what: the error and its cause, one or two sentences, naming the file, flag or symbol.
        hint: what to do about it; may be empty.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  → {self.hint}" if self.hint else self.what


class FlagError(ElasticDLError):
    """A flag, or a combination of flags, is wrong."""


class DataError(ElasticDLError):
    """A data source is missing, empty, damaged or not what it was said to be."""


class OtherColumnsError(DataError):
    """The validation data have other columns than the training data."""


class StorageError(DataError):
    """Storage that a URL names cannot be reached, or refuses."""


class StorageUnreachable(StorageError):
    """Storage gives no good answer in the time of the retries; it may later."""


class StorageFileMissing(StorageError):
    """There is no file, directory or bucket of that URL."""


class ModelDefinitionError(ElasticDLError):
    """The user's model-definition module is missing, lacks a symbol, or defines something unsupported.

    Attributes:
        details: the traceback of the user's own error; may be empty.
    """

    def __init__(self, what: str, hint: str = "", details: str = "") -> None:
        super().__init__(what, hint)
        self.details = details


class CheckpointError(ElasticDLError):
    """A checkpoint cannot be written or read."""


class LastCheckpointError(CheckpointError):
    """The last checkpoint of a training cannot be written, so the training has failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The last checkpoint was not written: {reason}",
            "See that --checkpoint_dir has room and can be written. Then a job of Local with the same --job_name "
            "continues from the newest whole checkpoint, and a job of AllReduceStrategy with --model_def and another "
            "--checkpoint_dir begins with it by --checkpoint_dir_for_init.",
        )


class JobError(ElasticDLError):
    """A job cannot be started, found or continued."""


class JobFailed(JobError):
    """A job has failed, or has stopped before its end.

    Attributes:
        exit_code: Exit code of the job; None if it stopped before its end.
        explanation: the output of `elasticdl explain`; may be empty.
    """

    def __init__(self, what: str, hint: str, exit_code: int | None, explanation: str) -> None:
        super().__init__(what, hint)
        self.exit_code = exit_code
        self.explanation = explanation

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.explanation}" if self.explanation else super().__str__()


class ImageError(ElasticDLError):
    """The container engine, the builder, the registry or the disk has failed; no flag is wrong."""
