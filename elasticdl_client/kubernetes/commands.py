"""Commands to type next, as messages show them."""

from __future__ import annotations

from elasticdl_client.job_spec import JobSpec


def elasticdl(verb: str, spec: JobSpec) -> str:
    """`elasticdl VERB JOB` for this job and no other."""
    return f"elasticdl {verb} {spec.job_name} --namespace={spec.namespace}{of_context(spec)}"


def kubectl(what: str, spec: JobSpec) -> str:
    """`kubectl WHAT` in the job's namespace."""
    return f"kubectl {what} --namespace={spec.namespace}{of_context(spec)}"


def grant(namespace: str, service_account: str) -> str:
    """Makes the service account and gives it the rights of a master."""
    account = "" if service_account == "elasticdl" else f" --service_account={service_account}"
    return f"elasticdl rbac --print --namespace={namespace}{account} | kubectl apply -f -"


def grant_user(namespace: str) -> str:
    """Give a user the rights to submit jobs and look after them."""
    return f"elasticdl rbac --print --for=user --user=NAME --namespace={namespace} | kubectl apply -f -"


def of_context(spec: JobSpec) -> str:
    """The flag of the context that was chosen, after a space; empty for the current one."""
    return f" --context={spec.context}" if spec.context else ""
