"""`elasticdl rbac`: prints what a namespace must grant, for `kubectl apply`.  It talks to no cluster."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest, parse, split_arguments
from elasticdl_client.kubernetes.rbac import manifests

USAGE = "elasticdl rbac --print [--flag=value …] | kubectl apply -f -"
FLAGS = {
    "print": "Print the YAML of a ServiceAccount, a Role and a RoleBinding. It is all that this command does.",
    "namespace": "Where jobs are to run; the same as theirs. [default]",
    "service_account": "The same as --service_account of jobs. [elasticdl]",
}
_DEFAULTS = {"print": True, "namespace": "default", "service_account": "elasticdl"}


def run(arguments: Sequence[str]) -> int:
    """Prints the manifests; the exit code.

    Raises:
        FlagError: the command line is wrong.
    """
    import yaml

    long = ["--namespace" if argument == "-n" else argument for argument in arguments]
    texts = split_arguments(long, _DEFAULTS)
    for name in texts:
        if name not in _DEFAULTS:
            near = nearest(name, list(_DEFAULTS))
            hint = f"Did you mean --{near}?" if near else "`elasticdl rbac --help` lists its flags."
            raise FlagError(f"Unknown flag --{name} of `elasticdl rbac`.", hint)
    values = {name: parse(name, texts.get(name, default), default) for name, default in _DEFAULTS.items()}
    print(
        yaml.safe_dump_all(manifests(str(values["namespace"]), str(values["service_account"])), sort_keys=False), end=""
    )
    return 0
