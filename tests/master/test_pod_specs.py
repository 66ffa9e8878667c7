"""What the pods of a job are given."""

from __future__ import annotations

from elasticdl.master.core.commands import CreatePod
from elasticdl.master.pod_specs import PodSpecs
from elasticdl.protocol.values import Role
from elasticdl_client.job_spec import JobSpec

VARIABLE = "GOMP_SPINCOUNT"


def variables(spec: JobSpec, role: Role) -> dict[str, str]:
    return dict(PodSpecs(spec, "python", "master:1").of(CreatePod("pod", role, 0, slot=0)).env)


def test_threads_of_workers_spin_for_a_moment_unless_the_user_says_for_how_long() -> None:
    spec = JobSpec(job_command="python train.py")
    assert 0 < int(variables(spec, Role.WORKER)[VARIABLE]) < 100_000  # about a millisecond
    assert VARIABLE not in variables(spec, Role.PS)
    assert variables(JobSpec(job_command="true", envs=f"{VARIABLE}=7"), Role.WORKER)[VARIABLE] == "7"


def test_a_variable_that_a_pod_inherits_encrypts_nothing() -> None:
    """ELASTICDL_ENCRYPT=false is the default of a flag in the user's shell, and the local runtime hands it on."""
    assert not variables(JobSpec(envs="ELASTICDL_ENCRYPT=false"), Role.PS)["ELASTICDL_ENCRYPT"]
    assert variables(JobSpec(encrypt=True), Role.PS)["ELASTICDL_ENCRYPT"] == "true"
