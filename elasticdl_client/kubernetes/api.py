"""The connection to a cluster: which one it is, a time-out on every call, and errors that say what to do.

Everything of the client that talks to Kubernetes goes through `connect` and makes its calls inside
`Connection.doing`, so no exception of a call reaches the user.

Below it, commands to type next, as messages show them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticdl_client.errors import ElasticDLError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes import names
from elasticdl_client.kubernetes.api_client import (
    READ_TIMEOUT_S,
    SERVICE_ACCOUNT,
    Access,
    ApiClient,
    ApiError,
    Query,
    checked,
    of_configuration,
    of_pod,
)

IN_CLUSTER = "in-cluster"  # the name of the context inside a pod
DEFAULT_NAMESPACE = "default"
_KUBECONFIG = "~/.kube/config"
OF_EVERY_POD = ("failed quota: ", " per Container is", " per Pod is")  # refusals of a master's pods, too
_OF_RANGE = (
    "A LimitRange of the namespace says so: change --{role}_resource_request and --{role}_resource_limit{others}; "
    "`kubectl describe limitrange` shows it."
)
_OF_LIMITS = {  # words of the server on resources → what to do
    "exceeded quota": "Ask for less, or wait until other pods of the namespace have ended.",
    "failed quota: ": "A quota of the namespace counts them: give each role all of them by --worker_resource_request "
    "and --worker_resource_limit, and the same of --master_ and --ps_.",
    " per Container is": _OF_RANGE,
    " per Pod is": _OF_RANGE,
    "must be less than or equal to": "Where a job gives no limit, a LimitRange of the namespace does: give "
    "--{role}_resource_limit, or a smaller --{role}_resource_request{others}.",
}


class ClusterError(ElasticDLError):
    """A cluster cannot be reached, or refuses.

    Attributes:
        status: the HTTP status; 0 if the cluster did not answer.
    """

    def __init__(self, what: str, hint: str = "", status: int = 0) -> None:
        super().__init__(what, hint)
        self.status = status

    @property
    def unreachable(self) -> bool:
        """Whether the cluster did not answer, or cannot now: the same call may work later."""
        return self.status == 0 or self.status == 429 or self.status >= 500


@dataclass(frozen=True, slots=True)
class Connection:
    """A cluster as the user named it.

    Attributes:
        context: Context of the kubeconfig, or `IN_CLUSTER`.
        namespace: the context's, or that of the pod that this runs in.
        server: the URL of its API server.
        client: sends its requests.
    """

    context: str
    namespace: str
    server: str
    client: ApiClient = field(repr=False)

    def get(self, path: str, query: Query = (), timeout_s: tuple[float, float] | None = None) -> Any:
        """Return an object, or a list of them, as the server shows it.

        Raises:
            ApiError: the server refuses.
        """
        return self._call("GET", path, query, timeout_s=timeout_s)

    def create(
        self, path: str, body: Mapping[str, Any], query: Query = (), timeout_s: tuple[float, float] | None = None
    ) -> Any:
        """Create an object; return it as the server shows it.

        Args:
            path: Path of the resource's list.
            body: the object.
            query: parameters, such as `dryRun`.
            timeout_s: Seconds to connect, and seconds between two reads.

        Raises:
            ApiError: the server refuses.
        """
        return self._call("POST", path, query, body, timeout_s=timeout_s)

    def delete(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        """Delete an object.

        Args:
            path: Path of the object.
            options: the DeleteOptions, such as `propagationPolicy`.

        Raises:
            ApiError: the server refuses.
        """
        self._call("DELETE", path, (), options)

    def patch(self, path: str, body: Mapping[str, Any], content_type: str, **options: Any) -> Any:
        """Change an object; return the answer.

        Args:
            path: Path of the object, such as `/api/v1/namespaces/x/pods/y`.
            body: the patch.
            content_type: its kind.
            options: `accept`, `timeout_s` of `ApiClient.send`.

        Raises:
            ApiError: the server refuses.
        """
        return self._call("PATCH", path, (), body, content_type=content_type, **options)

    def open(self, path: str, query: Query = (), timeout_s: tuple[float, float] | None = None) -> Any:
        """Return the answer itself, a `urllib3.HTTPResponse` with its body unread.

        Raises:
            ApiError: the server refuses.
        """
        return checked(self.client.send("GET", path, query, timeout_s=timeout_s))

    def _call(
        self, method: str, path: str, query: Query = (), body: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        response = self.client.send(method, path, query, body, **options)
        try:
            return json.loads(checked(response).data)
        finally:
            response.release_conn()

    @contextmanager
    def doing(self, what: str, role: str = "") -> Iterator[None]:
        """Around calls: their errors become `ClusterError`.

        Args:
            what: for the message, after "cannot": "read the pods of namespace x".
            role: Role of the pod to create, for the flags in the hint; empty: another object, or a pod of any role.

        Raises:
            ClusterError: the cluster does not answer, or refuses.
        """
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiError as error:
            raise self._refused(what, error, role) from error
        except (HTTPError, OSError) as error:
            raise self._unreachable(_reason(error)) from error
        except ValueError as error:  # an answer that does not fit the API
            raise ClusterError(f"Cannot {what}: {error}", "", 422) from error

    def _unreachable(self, reason: str) -> ClusterError:
        return ClusterError(
            f"The cluster of context {self.context} ({self.server}) cannot be reached: {reason}.",
            "Is it running, and is that the right context? `kubectl config get-contexts` lists them, "
            "--context=NAME or `kubectl config use-context NAME` chooses one.",
        )

    def _refused(self, what: str, error: ApiError, role: str) -> ClusterError:
        status = error.status
        said = _message(error)
        where = f"context {self.context}"
        if status == 401:
            return ClusterError(
                f"The cluster of {where} ({self.server}) rejects your credentials (401 Unauthorized).",
                "The credentials in the kubeconfig are wrong or have expired: log in again.",
                status,
            )
        hints = {
            403: f"Ask the administrator of the cluster of {where} for that right, or choose another --namespace.",
            404: f"This was looked for in the cluster of {where}; is it the right one, and is --namespace?",
            409: "It exists already, or has been changed by another client.",
        }
        hint = hint_on_limits(said, role) or hints.get(status, "")
        return ClusterError(f"Cannot {what}: {said}", hint, status)


def hint_on_limits(said: str, role: str = "") -> str:
    """Return what to do about a refusal by a quota or a LimitRange; empty: it is none.

    Args:
        said: the server's sentence.
        role: Role of the pod, for the flags in the hint; empty: unknown.
    """
    hint = next((hint for words, hint in _OF_LIMITS.items() if words in said), "")
    others = "" if role else ", or the same of the role that is named"
    return hint.replace("{role}", role or "worker").replace("{others}", others)


def is_configured() -> bool:
    """Return whether there is a configuration that could select a cluster."""
    return "KUBERNETES_SERVICE_HOST" in os.environ or any(path.exists() for path in _kubeconfigs())


def connect(force_kube_config: bool = False, context: str = "", first_answer_s: float = READ_TIMEOUT_S) -> Connection:
    """Return the cluster of a context, by default the current one; inside a pod, the pod's own.  Nothing is sent yet.

    Args:
        force_kube_config: use the kubeconfig file inside a pod, too.
        context: Context of the kubeconfig file, also inside a pod; empty: the current one.
        first_answer_s: how long a call waits for each of connection and answer, until the cluster has answered once.

    Raises:
        ClusterError: there is no usable configuration.
    """
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not force_kube_config and not context:
        context, namespace, access = _access_of_pod()
    else:
        context, namespace, access = _access_of_kubeconfig(context)
    return Connection(context, namespace, access.server, ApiClient(access, first_answer_s=first_answer_s))


def _access_of_pod() -> tuple[str, str, Access]:
    try:
        access = of_pod()
        namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"This is a pod without a usable service account: {error}",
            "Give --force_use_kube_config_file to use ~/.kube/config.",
        ) from error
    return IN_CLUSTER, namespace or DEFAULT_NAMESPACE, access


def _kubeconfigs() -> list[Path]:
    """Return the files that kubectl merges; a variable that is empty counts as not set."""
    files = os.environ.get("KUBECONFIG") or _KUBECONFIG
    return [Path(file).expanduser() for file in files.split(os.pathsep) if file]


def _access_of_kubeconfig(wanted: str) -> tuple[str, str, Access]:
    import yaml
    from kubernetes.client import Configuration
    from kubernetes.config import ConfigException, load_kube_config

    configuration = Configuration()
    try:
        read = {path: yaml.safe_load(path.read_text()) for path in _kubeconfigs() if path.exists()}
        contents = {path: content for path, content in read.items() if content}  # the package refuses empty ones
        if wanted:
            _context_of(contents, wanted)
        # The first file that names a current context counts for kubectl; the package takes the last, also an empty one.
        current = (content.get("current-context") for content in contents.values())
        name = wanted or next(filter(None, current), None)
        load_kube_config(config_file=_joined(contents), context=name, client_configuration=configuration)
        namespace = _context_of(contents, name)["context"].get("namespace")
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ClusterError(
            f"There is no usable cluster configuration in {_joined(_kubeconfigs())}: {error}",
            "Set KUBECONFIG to the file of your cluster; `kubectl config get-contexts` shows what it holds. "
            "Or --runtime=local: processes of this machine, no cluster.",
        ) from error
    return str(name), str(namespace or DEFAULT_NAMESPACE), of_configuration(configuration)


def _joined(paths: Iterable[Path]) -> str:
    return os.pathsep.join(map(str, paths))


def _context_of(contents: Mapping[Path, Any], wanted: Any) -> Any:
    """Return a context by its name; of several with one name the first counts, as for kubectl.

    Raises:
        ClusterError: there is none.
    """
    found = [context for content in contents.values() for context in content.get("contexts") or ()]
    for context in found:
        if context["name"] == wanted:
            return context
    listed = ", ".join(sorted(str(context["name"]) for context in found))
    raise ClusterError(f"There is no context {wanted} in {_joined(_kubeconfigs())}.", f"Existing contexts: {listed}.")


def _message(error: ApiError) -> str:
    """Return the message in the API server's answer, or else the HTTP reason."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
    return str(said)


def _reason(error: Exception) -> str:
    """Return the innermost cause, in one line and without the address of a Python object."""
    while isinstance(error.__cause__ or error.__context__, Exception):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__).splitlines()[0].rstrip(".")


def elasticdl_command(verb: str, spec: JobSpec) -> str:
    """`elasticdl VERB JOB` for this job and no other."""
    return f"elasticdl {verb} {spec.job_name} --namespace={spec.namespace}{of_context(spec)}"


def kubectl_command(what: str, spec: JobSpec) -> str:
    """`kubectl WHAT` in the job's namespace."""
    return f"kubectl {what} --namespace={spec.namespace}{of_context(spec)}"


def without_state(job_name: str, delete: str, spec: JobSpec | None) -> tuple[str, str]:
    """Return what has become of a job whose state was deleted alone, by hand, and what to do.

    Args:
        delete: the command that deletes the job.
        spec: The job; None: it cannot be read.
    """
    what = (
        f"The ConfigMap {names.state_object(job_name)}, with the job's journal and status, was deleted: the job cannot "
        "continue from it."
    )
    hint = f"`{delete}` removes what is left of it"
    if spec is not None and spec.job_dir:
        resume = f"elasticdl resume --job_dir={spec.job_dir} --namespace={spec.namespace}{of_context(spec)}"
        return what, f"{hint}; then `{resume}` continues it from its directory in storage."
    hint += "; then submit the job again"
    if spec is not None and spec.checkpoint_dir:
        start = f"--checkpoint_dir_for_init={spec.checkpoint_dir}"
        return what, f"{hint}, with another --checkpoint_dir and {start} to begin with its newest checkpoint."
    return what, f"{hint}."


def grant(namespace: str, service_account: str) -> str:
    """Return the command that creates the service account and gives it the rights of a master."""
    account = "" if service_account == "elasticdl" else f" --service_account={service_account}"
    return f"elasticdl rbac --print --namespace={namespace}{account} | kubectl apply -f -"


def grant_user(namespace: str) -> str:
    """Return the command that gives a user the rights to submit and manage jobs."""
    return f"elasticdl rbac --print --for=user --user=NAME --namespace={namespace} | kubectl apply -f -"


def of_context(spec: JobSpec) -> str:
    """Return the flag of the context that was chosen, after a space; empty for the current one."""
    return f" --context={spec.context}" if spec.context else ""
