"""The options of the job commands, and their errors."""

from __future__ import annotations

import pytest

from elasticdl_client import help as help_text
from elasticdl_client.errors import FlagError
from elasticdl_client.jobs.options import FORMATS, Options, options_of, parse


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("list", "", Options()),
        ("list", "-A -o json", Options(all_namespaces=True, output="json")),
        ("list", "--all-namespaces -ojson", Options(all_namespaces=True, output="json")),
        ("list", "--all_namespaces=false -o=wide", Options(output="wide")),
        ("status", "digits -n team", Options(jobs=("digits",), namespace="team")),
        ("status", "-nteam digits", Options(jobs=("digits",), namespace="team")),
        ("logs", "-f digits --role worker-0", Options(jobs=("digits",), follow=True, role="worker-0")),
        ("logs", "digits --all --tail=5", Options(jobs=("digits",), all=True, tail=5)),
        ("logs", "a --pod worker-1 --since 5m -p", Options(jobs=("a",), pod="worker-1", since="5m", previous=True)),
        ("status", "a -w", Options(jobs=("a",), watch=True)),
        ("delete", "a b --no-wait", Options(jobs=("a", "b"), wait=False)),
        ("delete", "a --wait=false --timeout 3", Options(jobs=("a",), wait=False, timeout=3.0)),
        ("clean", "--dry_run --runtime local", Options(dry_run=True, runtime="local")),
        ("resume", "a --job_dir=/j", Options(jobs=("a",), job_dir="/j")),
        ("resume", "--job-dir=s3://b/j --cluster-spec=c.py", Options(job_dir="s3://b/j", cluster_spec="c.py")),
        ("scale", "a --num-workers 4", Options(jobs=("a",), num_workers="4")),
        (
            "scale",
            "a --current_num_workers=2 --num_workers=0",
            Options(jobs=("a",), num_workers="0", current_num_workers="2"),
        ),
        (
            "chaos",
            "a --kill=worker,ps --for 1m --stop-for=3s -y",
            Options(jobs=("a",), kill="worker,ps", for_="1m", stop_for="3s", yes=True),
        ),
    ],
)
def test_arguments_come_in_any_order_and_in_kubectls_spelling(command: str, arguments: str, expected: Options) -> None:
    assert parse(command, arguments.split()) == expected


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("status", "", "needs the name of a job"),
        ("status", "a b", "takes one job"),
        ("list", "a", "takes no job's name"),
        ("status", "a --folow", "Unknown flag --folow"),
        ("status", "a -f", "Unknown flag -f"),
        ("logs", "a -fx", "Unknown flag -fx"),
        ("delete", "a --no_wiat", "Did you mean --no_wait"),
        ("list", "--namespac=a", "Did you mean --namespace"),
        ("list", "-n", "needs a value"),
        ("list", "-n a -n b", "given twice"),
        ("list", "-A -n a", "exclude each other"),
        ("resume", "a --cluster_spec=c.py", "--cluster_spec is for a job with its --job_dir in storage"),
        ("resume", "a --job_dir=/j --envs=A=b", "--envs is for a job with its --job_dir in storage"),
        ("list", "-o xml", "one of json, name, wide, yaml"),
        ("logs", "a -o yaml", "one of json"),
        ("logs", "a --role=boss", "not a pod of a job"),
        ("logs", "a --role=master --all", "exclude each other"),
        ("logs", "a --pod=elasticdl-b-worker-1", "not a pod of job a"),
        ("logs", "a --pod=ps-0 --role=ps", "exclude each other"),
        ("logs", "a --since=soon", "not a duration"),
        ("logs", "a -p -f", "nothing to follow"),
        ("logs", "a --tail=some", "whole number"),
        ("scale", "a", "needs --num_workers"),
        ("chaos", "a", "needs a fault"),
        ("chaos", "a --kill=boss", "no such role"),
        ("chaos", "a --kill=ps --every=0s", "not a duration"),
        ("chaos", "a --kill=ps --for_=9s", "Unknown flag"),
        ("chaos", "a --cut_network=worker", "only by the administrator"),
        ("scale", "--num_workers=2", "needs the name of a job"),
        ("scale", "a --num_workers=2 --current_num_workers=two", "not a number of workers"),
        ("scale", "a --num_ps_pods=2", "parameter servers of a running job is fixed"),
        ("list", "--runtime=docker", "one of kubernetes, local"),
        ("list", "--runtime=local -n a", "no namespace"),
        ("list", "--runtime=local --context a", "in no cluster"),
        ("list", "--job_dir=/j --runtime=kubernetes", "directory of a local job"),
        ("delete", "../etc", "not a job name"),
    ],
)
def test_a_wrong_command_line_is_refused_with_a_hint(command: str, arguments: str, said: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(command, arguments.split())
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("command", [*FORMATS, "rbac"])
def test_help_lists_every_option_in_readable_lines(command: str) -> None:
    lines = help_text.of_command(command, 100).splitlines()
    assert max(map(len, lines)) <= 100
    for name in options_of(command):
        assert any(f"--{name}" in line for line in lines)
    assert any("Usage" in line for line in lines)
