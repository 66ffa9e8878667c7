"""Secrets in flags and texts, and that nothing printed or stored in the open contains them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from elasticdl_client.errors import FlagError
from elasticdl_client.job_spec import JobSpec
from elasticdl_client.kubernetes.names import SECRET_FLAGS_KEY
from elasticdl_client.kubernetes.objects import job_manifests, master_pod, role_pod
from elasticdl_client.kubernetes.pods import pod_manifest
from elasticdl_client.secret_values import hide, hide_in_ends, hide_in_flag
from elasticdl_client.stored_job import with_secrets

ROOT = Path(__file__).resolve().parents[2]
SECRET = "m4rk3r"
FLAGS = {
    "job_name": "job",
    "namespace": "here",
    "image_name": "image:1",
    "model_def": "m.model",
    "training_data": f"postgresql://me:{SECRET}@host/db?table=t,postgresql://me:{SECRET}@b/db?table=u&sslpassword={SECRET}",
    "validation_data": f"https://host/file.csv?sig={SECRET}&part=1",
    "data_reader_params": f"password={SECRET},with a comma;partition=p",
    "model_params": f'connection={{"api_key": "{SECRET}", "units": 3}}',
    "envs": f"PLAIN={SECRET},with a comma,ADDRESS=$(MY_POD_IP):1",
    "cluster_spec_json": f'{{"pod_spec": {{"env": [{{"name": "SITE", "value": "{SECRET}"}}]}}}}',
}


def job(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", FLAGS | flags)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pw@host/db?table=t", "postgresql://me:***@host/db?table=t"),
        ("postgresql://me:p@w/:x@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db?table=t&key=id", "postgresql://me@host/db?table=t&key=id"),
        ("a://u:p@h/x,b://u:p@h/y", "a://u:***@h/x,b://u:***@h/y"),
        ("cannot open a://u:p@h/x of me@here.org", "cannot open a://u:***@h/x of me@here.org"),
        ("https://h/f?access_token=abc&x=1", "https://h/f?access_token=***&x=1"),
        ("https://h/f?X-Amz-Signature=abc&x=1", "https://h/f?X-Amz-Signature=***&x=1"),
        ("{'password': 'it\\'s', 'n': 1}", "{'password': \"***\", 'n': 1}"),
        ("python train.py --api-key abc --rate 0.1", "python train.py --api-key *** --rate 0.1"),
        ("PGPASSWORD=abc", "PGPASSWORD=***"),
        ("units=10;num_tokens=3;tokenizer=bert", "units=10;num_tokens=3;tokenizer=bert"),
        ("/data/train,/data/a=b.csv", "/data/train,/data/a=b.csv"),
    ],
)
def test_passwords_tokens_and_keys_are_hidden_and_nothing_else(text: str, shown: str) -> None:
    assert hide(text) == shown
    assert hide(shown) == shown


def test_a_quoted_password_with_a_semicolon_is_hidden_whole() -> None:
    assert hide_in_flag("data_reader_params", f"password='a;{SECRET}';x=1") == "password=***;x=1"


def test_a_pod_template_without_its_secrets_is_one_that_refers_to_the_same() -> None:
    container = {"name": "elasticdl", "env": [{"name": "SITE", "value": SECRET}, {"name": "A", "value": "$(SITE)"}]}
    spec = {
        "volumes": [{"name": "keys", "secret": {"secretName": "mine"}}],
        "automountServiceAccountToken": False,
        "tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes"}],
        "containers": [container],
    }
    shown = json.loads(str(hide_in_flag("worker_pod_template", json.dumps({"spec": spec}))))
    container["env"][0]["value"] = "***"  # type: ignore[index]
    assert shown == {"spec": spec}
    del container["env"]
    plain = json.dumps({"spec": spec})
    assert hide_in_flag("pod_template", plain) == plain
    assert hide_in_flag("pod_template", "a/worker.yaml") == "a/worker.yaml"


def test_a_job_of_storage_takes_its_template_again_where_that_has_a_secret(tmp_path: Path) -> None:
    template = {"spec": {"containers": [{"name": "elasticdl", "env": [{"name": "SITE", "value": SECRET}]}]}}
    text = json.dumps(template, separators=(",", ":"))
    whole = JobSpec.from_flags("train", {**FLAGS, "worker_pod_template": text})
    assert SECRET not in whole.public().worker_pod_template
    public = dataclasses.replace(JobSpec("job"), worker_pod_template=whole.public().worker_pod_template)
    with pytest.raises(FlagError, match="ELASTICDL_WORKER_POD_TEMPLATE"):
        with_secrets(public, "", {})
    file = tmp_path / "worker.yaml"
    file.write_text(yaml.safe_dump(template, sort_keys=False))
    assert with_secrets(public, "", {"ELASTICDL_WORKER_POD_TEMPLATE": str(file)}).worker_pod_template == text
    file.write_text("metadata: {labels: {team: a}}")
    with pytest.raises(FlagError, match="is another"):
        with_secrets(public, "", {"ELASTICDL_WORKER_POD_TEMPLATE": str(file)})


def test_the_public_part_of_a_job_and_its_secrets_make_the_whole_again() -> None:
    spec = job()
    public = spec.public()
    assert SECRET not in public.to_json()
    assert (
        public.training_data == "postgresql://me:***@host/db?table=t,postgresql://me:***@b/db?table=u&sslpassword=***"
    )
    assert public.envs == "PLAIN=***,ADDRESS=$(MY_POD_IP):1"
    assert public.data_reader_params == "password=***;partition=p"
    assert json.loads(public.cluster_spec_json)["pod_spec"]["env"] == [{"name": "SITE", "value": "***"}]
    assert JobSpec.from_json(public.to_json()).with_secrets(json.loads(json.dumps(spec.secrets()))) == spec
    plain = JobSpec.from_flags("train", {**FLAGS, **dict.fromkeys(spec.secrets(), ""), "training_data": "/data"})
    assert (plain.public(), plain.secrets()) == (plain, {})


def test_on_kubernetes_secrets_stand_in_the_secret_alone() -> None:
    spec = job(cluster_spec_json="")
    manifests = job_manifests(spec, "the-token")
    [secret] = [found for found in manifests if found["kind"] == "Secret"]
    others = [found for found in manifests if found is not secret]
    assert SECRET not in json.dumps(others)
    assert secret["stringData"]["token"] == "the-token"
    assert secret["stringData"]["env.PLAIN"] == f"{SECRET},with a comma"
    assert json.loads(secret["stringData"][SECRET_FLAGS_KEY]) == spec.secrets()
    worker = pod_manifest(spec, role_pod(spec, "worker"))
    assert SECRET not in json.dumps(worker)
    for pod in (manifests[-1], master_pod(manifests[0]["data"], "job", "u"), worker):
        env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
        reference = {"name": "elasticdl-job-token", "key": "env.PLAIN"}
        assert env["PLAIN"] == {"name": "PLAIN", "valueFrom": {"secretKeyRef": reference}}
        assert env["ADDRESS"]["value"] == "$(MY_POD_IP):1"  # Kubernetes resolves it here alone
    of_an_older_client = pod_manifest(spec, role_pod(spec, "worker"), has_secret_envs=False)
    env = {entry["name"]: entry.get("value") for entry in of_an_older_client["spec"]["containers"][0]["env"]}
    assert env["PLAIN"] == f"{SECRET},with a comma"


def test_a_variable_of_ours_does_not_take_the_value_of_the_users() -> None:
    worker = pod_manifest(job(envs="HOME=/there,PYTHONUNBUFFERED=1"), role_pod(job(), "worker"))
    env = {entry["name"]: entry for entry in worker["spec"]["containers"][0]["env"]}
    assert env["HOME"] == {"name": "HOME", "value": "/var/lib/elasticdl"}


def test_a_dry_run_prints_no_secret_and_yaml_writes_them_for_the_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "elasticdl_client.main", "train", "--dry_run", f"--yaml={file}"]
        + [f"--{name}={value}" for name, value in FLAGS.items()],
        cwd=ROOT,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown, made = list(yaml.safe_load_all(done.stdout)), list(yaml.safe_load_all(file.read_text()))
    assert [found["kind"] for found in shown] == [found["kind"] for found in made]
    [secret] = [found["stringData"] for found in shown if found["kind"] == "Secret"]
    [whole] = [found["stringData"] for found in made if found["kind"] == "Secret"]
    assert set(secret.values()) == {"***"}
    assert secret.keys() == whole.keys()
    assert SECRET not in done.stdout + done.stderr
    assert whole["token"] not in done.stdout + done.stderr
    assert whole["env.PLAIN"] == f"{SECRET},with a comma"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [("envs", SECRET), ("envs", f"A=1,A={SECRET}"), ("data_reader_params", f"password={SECRET};password={SECRET}")],
)
def test_a_flag_that_is_refused_is_not_shown_with_its_secret(name: str, value: str) -> None:
    with pytest.raises(FlagError) as refused:
        job(**{name: value})
    assert f"--{name}" in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("part", [".", "-", "a_", "http://host:80/a,"])
def test_a_long_line_costs_no_time(part: str) -> None:
    line, began = part * 5000, time.process_time()
    assert hide(line) == line
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "secret", [f"pgsql://me:{SECRET}@db/x", f'"token": "{SECRET} {SECRET}"', f"--password {SECRET * 20}"]
)
def test_of_a_long_text_both_ends_are_shown_and_no_part_of_a_secret(secret: str) -> None:
    for gap in range(0, len(secret) + 2, len(secret) // 11 + 1):  # the cuts move through a secret
        text = f"begin {gap * '.'}{f'{secret}; ' * 4000}{gap * '.'} end"  # hidden, less than the longest is left of it
        shown = hide_in_ends(text, 20_000)
        assert shown.startswith("begin ")
        assert shown.endswith(" end")
        assert len(shown) <= 20_003
        assert not [part for part in (SECRET[:3], SECRET[1:4], SECRET[2:5], SECRET[3:]) if part in shown]


def test_a_text_of_many_megabytes_is_cut_before_it_is_searched() -> None:
    began = time.process_time()
    assert len(hide_in_ends("x=1;" * (20 << 20), 1 << 20)) == (1 << 20) + 3
    assert time.process_time() - began < 3.0
