"""`elasticdl rbac`: prints what a namespace must grant, for `kubectl apply`.  It talks to no cluster."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl_client.errors import FlagError
from elasticdl_client.flags import nearest, parse, split_arguments
from elasticdl_client.kubernetes.rbac import Manifest, manifests, user_manifests

USAGE = "elasticdl rbac --print [--flag=value …] | kubectl apply -f -"
FLAGS = {
    "print": "Print the YAML of a ServiceAccount, a Role and a RoleBinding. It is all that this command does.",
    "for": "Whose rights: master, or user, for those that submit jobs and look after them. [master]",
    "user": "With --for=user: the name of a user, as the cluster knows it.",
    "group": "With --for=user: the name of a group instead.",
    "namespace": "Where jobs are to run; the same as theirs. [default]",
    "service_account": "The same as --service_account of jobs. [elasticdl]",
}
_DEFAULTS = {
    "print": True,
    "for": "master",
    "user": "",
    "group": "",
    "namespace": "default",
    "service_account": "elasticdl",
}


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
    wanted = _manifests({name: str(value) for name, value in values.items()})
    print(yaml.safe_dump_all(wanted, sort_keys=False), end="")
    return 0


def _manifests(values: dict[str, str]) -> list[Manifest]:
    subjects = {name: values[name] for name in ("user", "group") if values[name]}
    if values["for"] not in ("master", "user"):
        raise FlagError(f"--for is master or user, not '{values['for']}'.", "Choose one of these.")
    if values["for"] == "master":
        if subjects:
            raise FlagError(f"--{next(iter(subjects))} is for the rights of a user.", "Give --for=user, too.")
        return manifests(values["namespace"], values["service_account"])
    if len(subjects) != 1:
        raise FlagError(
            "--for=user needs the name of one user or group.",
            "Give --user=NAME, as `kubectl auth whoami` shows it, or --group=NAME.",
        )
    ((kind, name),) = subjects.items()
    return user_manifests(values["namespace"], kind.capitalize(), name)
