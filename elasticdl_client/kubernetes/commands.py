"""Commands to type next, as messages show them."""

from __future__ import annotations


def elasticdl(verb: str, job_name: str, namespace: str) -> str:
    """`elasticdl VERB JOB` in the job's namespace."""
    return f"elasticdl {verb} {job_name}{_in(namespace)}"


def kubectl_logs(pod_name: str, namespace: str) -> str:
    """Follows a pod's log."""
    return f"kubectl logs -f {pod_name}{_in(namespace)}"


def grant(namespace: str, service_account: str) -> str:
    """Makes the service account and gives it the rights of a master."""
    account = "" if service_account == "elasticdl" else f" --service_account={service_account}"
    return f"elasticdl rbac --print{_in(namespace)}{account} | kubectl apply -f -"


def _in(namespace: str) -> str:
    return f" --namespace={namespace}"
