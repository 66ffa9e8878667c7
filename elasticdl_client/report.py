"""The end of a job that was followed, for every command and both runtimes: its error, its figures, what to do next.

Prints only.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import shlex
import sys

from elasticdl_client import goodput, progress
from elasticdl_client.checks import as_job_name
from elasticdl_client.choices import DistributionStrategy, JobType, Runtime
from elasticdl_client.data_sources import ROW
from elasticdl_client.explain.failures import frames_of_user
from elasticdl_client.job_events import EventHistory, EventKind, JobEvent, with_metrics_of
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.job_status import Ended, JobStatus
from elasticdl_client.news import MAX_UNTHINNED, lost_text, metrics_text
from elasticdl_client.progress import age
from elasticdl_client.secret_values import hide

_MAX_LOST = 5  # lost pods that are named one by one
_MORE_IS_BETTER = frozenset({"accuracy", "acc", "auc", "precision", "recall", "f1", "ndcg", "bleu", "iou", "r2"})
_LESS_IS_BETTER = frozenset({"loss", "logloss", "error", "mse", "mae", "rmse", "perplexity", "crossentropy"})
_LOSSES = (EventKind.POD_LOST, EventKind.POD_GIVEN_UP)


def print_end(
    spec: JobSpec, ended: Ended, history: EventHistory | None, *, logs: str, hint: str, is_kept: bool = True
) -> None:
    """Print the end of a job that was followed: why it failed, coverage and metrics, its figures, what to do next.

    Args:
        spec: The job.
        ended: how it ended.
        history: its events; None where that could not be read.
        logs: where the logs are, or the command that shows them.
        hint: what to do after a failure.
        is_kept: whether logs and results outlive this process's call; else no place is named.
    """
    status = ended.status
    if ended.exit_code != 0:
        message = with_users_line(ended.message) or "it reported no reason."
        error = progress.paint("error:", progress.Color.RED, sys.stderr)
        print(f"{error} Job {spec.job_name} failed: {message}", file=sys.stderr)
        print(f"  → `elasticdl explain {spec.job_name} {_where(spec)}` says why. {hint}", file=sys.stderr, flush=True)
    for line in _results(status) if status is not None else ():
        print(line)
    if ended.exit_code == 0:
        if status is not None and not status.records_done and not status.records_total:
            print(_warning("warning: the commands have taken no data from ElasticDL: each has run by itself"))
        print(progress.paint(f"Job {spec.job_name} succeeded.", progress.Color.GREEN, sys.stdout))
    history = history or EventHistory()
    made = _made(dataclasses.replace(spec, output="") if history.has_no_model else spec, ended)
    places = [*made, ("logs", logs)] if is_kept else []
    for name, text in [*_figures(status, history), *places]:
        if text:
            print(f"{name}: {text}")
    sys.stdout.flush()


def _results(status: JobStatus) -> list[str]:
    """Describe the coverage of the records and the quality of the model."""
    few = len(status.coverage) <= MAX_UNTHINNED
    lines = progress.coverage_lines(status, MAX_UNTHINNED if few else 1)
    if status.metrics:
        when = f"final evaluation at step {status.metrics_step}" if status.metrics_step else "metrics"
        lines.append(f"{when}: {metrics_text(status)}")
    if staleness := progress.staleness_text(status):
        lines.append(f"staleness of gradients: {staleness}")
    if status.records_skipped:
        lines.append(_warning(f"warning: {status.records_skipped:,} records were left out by --nan_policy=skip"))
    return lines


def _warning(text: str) -> str:
    return progress.paint(text, progress.Color.YELLOW, sys.stdout)


def _figures(status: JobStatus | None, history: EventHistory) -> list[tuple[str, str]]:
    """Name and text of each figure; the text is empty where there is nothing to say."""
    if status is None:
        return []
    return [
        ("best", best_metrics(history)),
        ("duration", _duration(status)),
        ("losses", lost_pods(history)),
        ("time of workers", goodput.summary(status.worker_seconds)),
    ]


def _duration(status: JobStatus) -> str:
    if not status.elapsed_seconds:
        return ""
    rate = status.records_done / status.elapsed_seconds
    return f"{age(status.elapsed_seconds)}, {status.records_done:,} records, {rate:,.0f} records/s on average"


def lost_pods(history: EventHistory) -> str:
    """Return which pods were lost and why; of many how many by cause; empty if none was."""
    lost = [event for event in history.events if event.kind in _LOSSES]
    num_older = sum(history.summed_up.get(kind.value, 0) for kind in _LOSSES)
    if num_older + len(lost) <= _MAX_LOST:
        older = [f"{num_older} earlier"] if num_older else []
        return "; ".join([*older, *(lost_text(event) for event in lost)])
    causes = collections.Counter(_cause(event) for event in lost)
    counts = [f"{count} {cause}" for cause, count in causes.most_common()]
    return f"{num_older + len(lost)} pods: " + ", ".join([*counts, *([f"{num_older} earlier"] if num_older else [])])


def _cause(event: JobEvent) -> str:
    return str(event.details.get("reason") or "given up")


def best_metrics(history: EventHistory) -> str:
    """Return the best value of each metric, where the last evaluation has another.

    A metric whose name does not say whether more or less is better is left out.
    """
    evaluations = [event for event in history.events if event.kind is EventKind.EVALUATION_FINISHED]
    extremes = history.extremes
    for event in evaluations:
        extremes = with_metrics_of(event, extremes)
    found = []
    for name, last in evaluations[-1].details.items() if evaluations else ():
        words = set(re.findall("[a-z0-9]+", name.lower()))
        if name not in extremes or not words & (_MORE_IS_BETTER | _LESS_IS_BETTER):
            continue
        one, is_more = extremes[name], bool(words & _MORE_IS_BETTER)
        best, step = (one.greatest, one.greatest_step) if is_more else (one.least, one.least_step)
        if best != last:
            found.append(f"{name} {best:.4g} at step {step}")
    return ", ".join(found)


def _made(spec: JobSpec, ended: Ended) -> list[tuple[str, str]]:
    """List the results of a job that succeeded: where they are, and the commands that show and use them."""
    if ended.exit_code != 0:
        return []
    output = "statistics" if spec.job_type is JobType.ANALYZE else "model"
    of_statement = spec.prediction_columns == ROW  # which takes them into its table, and removes the files
    predictions = "" if of_statement else hide(spec.prediction_outputs)
    made = {output: spec.output, "predictions": predictions, "metrics": spec.metrics_output}
    return [(name, path) for name, path in made.items() if path][:1] + [("next", one) for one in _next_commands(spec)]


def _next_commands(spec: JobSpec) -> list[str]:
    commands = []
    if spec.tensorboard_log_dir:
        commands.append(f"elasticdl tensorboard {spec.job_name} {_where(spec)}")
    if spec.job_type is JobType.TRAIN and spec.output and spec.model_def:
        strategy = DistributionStrategy.ALL_REDUCE.value
        image = f"--image_name={spec.image_name} " if spec.image_name else ""
        name = as_job_name(f"predict-{spec.job_name}")
        commands.append(
            f"elasticdl predict {_where(spec)} --job_name={name} {image}--model_zoo={shlex.quote(spec.model_zoo)} "
            f"--model_def={spec.model_def} --checkpoint_dir_for_init={shlex.quote(spec.output)} "
            f"--distribution_strategy={strategy} --prediction_data=DATA --prediction_outputs=DIRECTORY"
        )
    return commands


def _where(spec: JobSpec) -> str:
    if spec.runtime is Runtime.LOCAL:
        return "--runtime=local"
    return f"--namespace={spec.namespace}" + (f" --context={spec.context}" if spec.context else "")


_CHAINED = re.compile("The above exception was the direct cause|During handling of the above exception")


def with_users_line(text: str) -> str:
    """Return a message without the frames of tracebacks, but for the innermost one in a file of the user's."""
    message = without_frames(text)
    for frame in frames_of_user(text)[-1:]:
        if f'File "{frame.path}", line {frame.line}' not in message:  # a `feed` of Keras names it in its error
            message += "".join(f"\n  {line}" for line in str(frame).splitlines())
    return message


def without_frames(text: str) -> str:
    """Return a message with the frames of tracebacks left out, and of their last lines those that it holds already.

    The pod's log has the whole; users need the error first.
    """
    kept: list[str] = []
    in_frames, link = False, ""
    for line in text.splitlines():
        if line.strip() == "Traceback (most recent call last):":
            in_frames = True
        elif _CHAINED.match(line):
            link = line
        elif not in_frames or (line.strip() and not line.startswith(" ")):
            said = line.partition(": ")[2] if line.startswith("elasticdl.") else ""  # ours wrap the user's
            if in_frames and any((said or line) in earlier for earlier in kept):
                link = ""  # nor how it came about
            elif line:
                kept += [link, "", line] if link else [line]
                link = ""
            elif kept and kept[-1]:
                kept.append(line)
            in_frames = False
    return "\n".join(kept).rstrip()
