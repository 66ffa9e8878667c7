"""Flags: text to typed values, what is refused and with which words, and round trips."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl_client import flag_sources
from elasticdl_client.checks import check_outputs
from elasticdl_client.choices import DistributionStrategy, JobType, LogFormat, LogLevel, NanPolicy, WireDtype
from elasticdl_client.errors import FlagError
from elasticdl_client.flags import flag_of, split_arguments
from elasticdl_client.job_spec import JobSpec, flag_defaults, flag_fields
from elasticdl_client.params import parse_envs, parse_params

GPUS = {
    "runtime": "kubernetes",
    "image_name": "image",
    "worker_resource_request": "cpu=8,memory=64Gi,amd.com/gpu=8",
    "distribution_strategy": "AllReduceStrategy",
}
LOCAL = {"job_name": "job", "runtime": "local", "model_def": "m.model", "training_data": "/data"}

EXAMPLES: dict[str, tuple[str, object]] = {
    "job_name": ("001", "001"),
    "runtime": ("LOCAL", "local"),
    "distribution_strategy": ("AllreduceStrategy", DistributionStrategy.ALL_REDUCE),
    "num_workers": ("7", 7),
    "num_ps_pods": ("3", 3),
    "seed": ("42", 42),
    "log_level": ("debug", LogLevel.DEBUG),
    "log_format": ("JSON", LogFormat.JSON),
    "model_def": ("a.b.Model", "a.b.Model"),
    "model_params": ("units=10;name=None", "units=10;name=None"),
    "minibatch_size": ("128", 128),
    "num_minibatches_per_task": ("4", 4),
    "shuffle": ("yes", True),
    "num_epochs": ("-1", -1),
    "max_step": ("10", 10),
    "log_loss_steps": ("5", 5),
    "nan_policy": ("skip", NanPolicy.SKIP),
    "checkpoint_steps": ("100", 100),
    "use_async": ("false", False),
    "get_model_steps": ("4", 4),
    "max_staleness": ("8", 8),
    "lr_staleness_modulation": ("true", True),
    "wire_dtype": ("BFloat16", WireDtype.BFLOAT16),
    "embedding_threshold": ("512KB", "512KB"),
    "keep_checkpoint_max": ("0", 0),
    "max_task_failures": ("5", 5),
    "max_bad_records": ("2", 2),
    "lease_timeout": ("1e-3", 0.001),
    "step_timeout": ("30", 30.0),
    "local_slots": ("3", 3),
    "master_port": ("50001", 50001),
    "metrics_port": ("9100", 9100),
    "job_dir": ("None", "None"),
    "training_data": ("a,b", "a,b"),
    "worker_resource_request": ("cpu=500m,memory=1Gi,gpu=1", "cpu=500m,memory=1Gi,gpu=1"),
    "volume": ("claim_name=c,mount_path=/d", "claim_name=c,mount_path=/d"),
    "worker_pod_priority": ("0.5", "0.5"),
    "envs": ("A=1,2,B=3", "A=1,2,B=3"),
    "data_reader_params": ("reader_type='CSV'", "reader_type='CSV'"),
    "feed": ("other.module.feed", "other.module.feed"),
    "image_pull_policy": ("never", "Never"),
    "cluster_spec_json": ('{"pod_spec": {"labels": {}}}', '{"pod_spec": {"labels": {}}}'),
}


def train(**flags: object) -> JobSpec:
    return JobSpec.from_flags("train", LOCAL | flags)


def refused(**flags: object) -> FlagError:
    with pytest.raises(FlagError) as caught:
        flag_sources.check(train(**flags))
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_flag_becomes_a_value_of_its_type_and_nothing_else(name: str) -> None:
    text, value = EXAMPLES[name]
    parsed = getattr(train(**{name: text}), name)
    assert parsed == value
    assert type(parsed) is type(flag_fields("train")[name].default)


def test_every_flag_has_a_line_of_help_and_is_in_a_command() -> None:
    flags = [field for field in dataclasses.fields(JobSpec) if field.name != "job_type"]
    commands = set().union(*(flag_fields(kind) for kind in JobType))
    for field in flags:
        found = flag_of(field)
        assert found is not None
        assert found.help.endswith(".") or found.help.endswith('".')
        assert "\n" not in found.help
        assert field.name in commands


def test_image_model_data_and_job_name_are_enough() -> None:
    spec = JobSpec.from_flags(
        "train", {"image_name": "i:1", "model_def": "m.model", "training_data": "/data", "job_name": "job"}
    )
    assert (spec.num_workers, spec.num_ps_pods, spec.use_async) == (2, 1, True)
    assert spec.distribution_strategy is DistributionStrategy.PARAMETER_SERVER
    assert not spec.job_command


@pytest.mark.parametrize("name", ["AllReduceStrategy", "AllreduceStrategy"])
def test_all_reduce_has_no_servers_by_itself(name: str) -> None:
    spec = train(distribution_strategy=name, num_workers=4, min_workers=2, fixed_global_batch=256)
    flag_sources.check(spec)
    assert (spec.num_workers, spec.num_ps_pods, spec.collective_timeout) == (4, 0, 5.0)


def test_the_local_strategy_has_one_worker_and_no_servers_by_itself() -> None:
    spec = train(distribution_strategy="local")
    assert (spec.num_workers, spec.num_ps_pods) == (1, 0)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("num_workers", "two", "whole number"),
        ("num_workers", "1e3", "whole number"),
        ("num_workers", "0", "between 1"),
        ("lease_timeout", "soon", "a number"),
        ("lease_timeout", "nan", "a number"),
        ("lease_timeout", "0", "more than 0"),
        ("use_async", "maybe", "true or false"),
        ("runtime", "localhost", "one of kubernetes, local"),
        ("job_name", "My_Job", "letter or digit first and last, such as my-job"),
        ("job_name", "a" * 41, "at most 40"),
        ("model_def", "model", "package.module.symbol"),
        ("feed", "3d", "name of a symbol"),
        ("model_params", "units", "not of the form name=value"),
        ("model_params", "a=1;a=2", "given twice"),
        ("master_port", "70000", "between 0"),
        ("metrics_port", "70000", "between 0"),
        ("populate_env_names", "(", "regular expression"),
        ("cluster_spec_json", "{", "not JSON"),
        ("cluster_spec_json", '{"master_spec": {}}', "'master_spec'"),
        ("cluster_spec_json", '{"pod_spec": {"labels": []}}', "'labels' of 'pod_spec' must be a JSON object"),
        ("cluster_spec_json", '{"pod_spec": {"tolerations": {}}}', "'tolerations' of 'pod_spec' must be a list"),
        ("cluster_spec_json", '{"ps_pod_spec": {"env": [{"value": "v"}]}}', "entry without a name"),
        ("worker_resource_limit", "cpu=x", "invalid cpu request spec: x"),
        ("volume", "mount=/d", "not in the allowed list of volume keys"),
        ("worker_pod_priority", "highest", "please set priority = high/low/a fraction value"),
        ("envs", "novalue", "not of the form NAME=value"),
        ("restart_policy", "Always", "one of OnFailure, Never"),
        ("wire_dtype", "float64", "one of float32, float16, bfloat16"),
        ("embedding_threshold", "big", "is not a size"),
        ("embedding_threshold", "2PB", "is not a size"),
        ("embedding_threshold", "-1", "is not a size"),
        ("sync_version_tolerance", "-1", "at least 0"),
        ("get_model_steps", "0", "at least 1"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, text: str, said: str) -> None:
    error = refused(**{name: text})
    assert f"--{name}" in str(error)
    assert said in error.what


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_ps_pods": 0}, "needs a parameter server"),
        ({"distribution_strategy": "Local", "num_ps_pods": 1}, "no parameter servers"),
        ({"distribution_strategy": "Local", "num_workers": 2}, "one worker"),
        ({"evaluation_steps": 10}, "--validation_data"),
        ({"grads_to_wait": 2}, "--use_async"),
        ({"use_async": False, "get_model_steps": 2}, "asynchronous"),
        ({"use_async": False, "max_staleness": 2}, "asynchronous"),
        ({"use_async": False, "lr_staleness_modulation": True}, "asynchronous"),
        ({"sync_version_tolerance": 1}, "--use_async"),
        ({"get_model_steps": 4, "max_staleness": 2}, "below --get_model_steps"),
        ({"distribution_strategy": "Local", "use_async": False}, "--use_async is for parameter servers"),
        ({"distribution_strategy": "Local", "get_model_steps": 2}, "--get_model_steps is for parameter servers"),
        ({"distribution_strategy": "Local", "wire_dtype": "float16"}, "--wire_dtype is for parameter servers"),
        ({"distribution_strategy": "Local", "embedding_threshold": "1MB"}, "--embedding_threshold is for parameter"),
        ({"distribution_strategy": "AllReduceStrategy", "num_ps_pods": 1}, "no parameter servers"),
        ({"distribution_strategy": "AllReduceStrategy", "use_async": False}, "--use_async is for parameter servers"),
        ({"distribution_strategy": "AllReduceStrategy", "wire_dtype": "float16"}, "--wire_dtype is for parameter"),
        (
            {"distribution_strategy": "AllReduceStrategy", "fixed_global_batch": 100},
            "not a multiple of --minibatch_size",
        ),
        ({"distribution_strategy": "AllReduceStrategy", "min_workers": 3}, "is more than --num_workers=2"),
        ({"fixed_global_batch": 128}, "--fixed_global_batch is for AllReduceStrategy"),
        ({"min_workers": 2}, "--min_workers is for AllReduceStrategy"),
        ({"collective_timeout": 2}, "--collective_timeout is for AllReduceStrategy"),
        ({"shard_optimizer": True}, "--shard_optimizer is for AllReduceStrategy"),
        ({"runtime": "kubernetes", "image_name": "i", "job_dir": "/x"}, "is a directory of this machine"),
        ({"runtime": "kubernetes"}, "--image_name"),
        ({"runtime": "kubernetes", "image_name": "i", "wait": True, "dry_run": True}, "--wait"),
        (
            {"runtime": "kubernetes", "image_name": "i", "ps_resource_limit": "cpu=500m,memory=8Gi"},
            "--ps_resource_request=cpu=1,memory=4096Mi is more cpu than --ps_resource_limit",
        ),
        ({"runtime": "kubernetes", "image_name": "i", "metrics_port": 50001}, "the port of the master itself"),
        ({"master_port": 9100, "metrics_port": 9100}, "the port of the master itself"),
        ({"training_data": ""}, "--training_data"),
        ({"dataset_fn": "a", "feed": "b"}, "older name"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, object], said: str) -> None:
    assert said in str(refused(**flags))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"distribution_strategy": "Local", "checkpoint_dir_for_init": "/c"}, "--checkpoint_dir_for_init"),
        ({"distribution_strategy": "Local", "nan_policy": "skip"}, "--nan_policy=skip"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(flags: dict[str, object], named: str) -> None:
    assert named in refused(**flags).what


@pytest.mark.parametrize(
    "flags",
    [
        {"use_async": False, "grads_to_wait": 2, "sync_version_tolerance": 1},
        {"get_model_steps": 4, "max_staleness": 4, "lr_staleness_modulation": True},
        {"wire_dtype": "bfloat16", "embedding_threshold": "0", "nan_policy": "skip"},
    ],
)
def test_every_mode_of_the_parameter_servers_can_be_asked_for(flags: dict[str, object]) -> None:
    flag_sources.check(train(**flags))
    assert flag_sources.notes(train(**flags)) == []


def test_a_script_says_which_multiple_of_its_batches_a_global_batch_is() -> None:
    flags = {"model_def": "", "job_command": "python train.py", "distribution_strategy": "AllReduceStrategy"}
    flag_sources.check(train(**flags, fixed_global_batch=80))


def test_a_round_of_more_gradients_than_workers_is_noted_and_harmless() -> None:
    spec = train(use_async=False, grads_to_wait=5, num_workers=4)
    flag_sources.check(spec)
    (note,) = flag_sources.notes(spec)
    assert "--grads_to_wait=5 is more than --num_workers=4" in note


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1", 1), ("100B", 100), ("512KB", 2**19), ("2MB", 2**21), ("1.5 mb", 3 * 2**19), ("1GiB", 2**30)],
)
def test_a_size_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert train(embedding_threshold=text).embedding_threshold_bytes == size


def test_on_kubernetes_flags_without_effect_are_named() -> None:
    both = {"cluster_spec": "c.py", "cluster_spec_json": '{"pod_spec": {"labels": {"a": "b"}}}'}
    assert "--cluster_spec_json" in flag_sources.notes(train(runtime="kubernetes", image_name="i", **both))[0]
    services = both | {"cluster_spec_json": '{"service_spec": {"type": "ClusterIP"}}'}
    assert flag_sources.notes(train(runtime="kubernetes", image_name="i", **services)) == []
    assert flag_sources.notes(train(runtime="kubernetes", image_name="i", need_tf_config=True)) == []


@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "AllReduceStrategy", "Local"])
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_evaluate_and_predict_go_with_every_strategy_and_need_a_model(command: str, strategy: str) -> None:
    data = {"evaluate": "validation_data", "predict": "prediction_data"}[command]
    flags = {"job_name": "j", "runtime": "local", "model_def": "m.f", data: "/d", "distribution_strategy": strategy}
    with pytest.raises(FlagError, match="needs --checkpoint_dir_for_init"):
        JobSpec.from_flags(command, flags)
    flag_sources.check(JobSpec.from_flags(command, {**flags, "checkpoint_dir_for_init": "/c"}))


def test_an_unknown_flag_gets_the_nearest_known_one() -> None:
    assert "--num_workers" in refused(num_worker=3).hint
    assert "--minibatch_size" in refused(mini_batch_size=3).hint
    assert "--help" in refused(zzzz=3).hint


def test_what_is_not_like_any_flag_gets_none() -> None:
    with pytest.raises(FlagError) as caught:
        JobSpec.from_flags("train", {**LOCAL, "learning_rate": "0.1"})
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("place", ["out.csv", "s3://bucket/out.parquet/"])
def test_predictions_are_no_single_file(place: str) -> None:
    with pytest.raises(FlagError, match=f"--prediction_outputs={place}: is to be a directory"):
        JobSpec.from_flags(JobType.PREDICT, {"prediction_outputs": place})


def test_a_directory_of_predictions_may_have_another_ending() -> None:
    assert check_outputs("digits.auto") == ""


def test_a_scheme_in_capitals_is_refused_as_no_package_reads_it() -> None:
    with pytest.raises(FlagError, match="--output=S3://bucket/model: has a scheme in capitals; write s3://"):
        JobSpec.from_flags("train", {**LOCAL, "output": "S3://bucket/model"})


def test_a_url_is_no_path() -> None:
    with pytest.raises(FlagError, match="--log_file_path=s3://bucket/model: is a URL; mount the bucket"):
        JobSpec.from_flags("train", {**LOCAL, "log_file_path": "s3://bucket/model"})


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("worker_resource_request", "memory=16", "For example memory=4096Mi; the unit is needed."),
        (
            "cluster_spec_json",
            '{"pod_spec": {"nodeSelector": {}}}',
            "Other fields of pods: --pod_template, a YAML file.",
        ),
        ("volume", "claim_name=a", "For example claim_name=my-claim,mount_path=/data"),
        ("model_params", "lr", 'Write --model_params="name=value;name2=value2"'),
    ],
)
def test_a_wrong_value_gets_the_hint_of_what_is_wrong(name: str, text: str, hint: str) -> None:
    with pytest.raises(FlagError) as caught:
        JobSpec.from_flags("train", {**LOCAL, name: text})
    assert hint in caught.value.hint


def test_a_flag_of_another_command_is_called_that() -> None:
    assert refused(prediction_data="/d").what == "--prediction_data is a flag of predict, not of train."


def test_older_names_and_retired_flags_are_settled() -> None:
    assert train(dataset_fn="parse").feed == "parse"
    assert train(need_elasticdl_job_service="True", task_fault_tolerance=True) == train()
    assert "this flag is gone" in refused(need_elasticdl_job_service="False").what
    assert "--max_task_failures" in refused(relaunch_on_worker_failure=3).hint
    assert "this flag is gone" in refused(aux_params="disable_relaunch=True").what


def test_arguments_are_split_without_being_guessed_at() -> None:
    arguments = ["--job_name=001", "--lease-timeout", "1e-3", "--shuffle", "--use_async", "False", "--envs=a=b,c=--d"]
    found = split_arguments([*arguments, "--num_epochs", "-1", "--model_params=x=1;y=[1,2]"], flag_defaults("train"))
    assert found == {
        "job_name": "001",
        "lease_timeout": "1e-3",
        "shuffle": "true",
        "use_async": "False",
        "envs": "a=b,c=--d",
        "num_epochs": "-1",
        "model_params": "x=1;y=[1,2]",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.csv"], "'train.csv' is not a flag"),
        (["--shuffle", "train.csv"], "'train.csv' is not a flag"),
        (["--job_name"], "needs a value"),
        (["--job_name", "--shuffle"], "needs a value"),
        (["--seed=1", "--seed=2"], "given twice"),
    ],
)
def test_stray_and_repeated_arguments_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(FlagError, match=said):
        split_arguments(arguments, flag_defaults("train"))


def test_params_are_literals_or_strings_and_never_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    command = f"__import__('os').mkdir({str(trap)!r})"
    assert parse_params("data_reader_params", "delimiter=\";\";note='a;b';x=it's;y='s;z=[\"p;q\", 1]; w=2") == {
        "delimiter": ";",
        "note": "a;b",
        "x": "it's",
        "y": "'s",
        "z": ["p;q", 1],
        "w": 2,
    }
    params = parse_params("model_params", f"a=1; b='x';c=[1, 2.5];d=None;e={command};f=plain text;g=a=b;")
    assert params == {"a": 1, "b": "x", "c": [1, 2.5], "d": None, "e": command, "f": "plain text", "g": "a=b"}
    assert not os.path.exists(trap)
    assert train(model_params="units=3").model_params_dict() == {"units": 3}


def test_a_comma_inside_an_environment_value_stays() -> None:
    assert parse_envs("a=1,2,b=3") == {"a": "1,2", "b": "3"}
    assert parse_envs("a=b=c,d=1") == {"a": "b=c", "d": "1"}
    assert parse_envs("") == {}


text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
specs = st.fixed_dictionaries(
    {
        "job_name": st.from_regex(r"[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?", fullmatch=True),
        "runtime": st.just("local"),
        "model_def": st.just("a.b.c"),
        "training_data": text.filter(bool),
    },
    optional={
        "model_zoo": text,
        "output": text,
        "distribution_strategy": st.sampled_from(list(DistributionStrategy)),
        "seed": st.integers(0, 2**31 - 1),
        "minibatch_size": st.integers(1, 2**31 - 1),
        "num_epochs": st.integers(-5, 10**9),
        "shuffle": st.booleans(),
        "lease_timeout": st.floats(1e-6, 1e9),
        "log_level": st.sampled_from(list(LogLevel)),
        "checkpoint_dir_for_init": text,
        "nan_policy": st.sampled_from(list(NanPolicy)),
        "model_params": st.dictionaries(st.from_regex("[a-z]{1,8}", fullmatch=True), st.integers(), max_size=3).map(
            lambda params: ";".join(f"{key}={value!r}" for key, value in params.items())
        ),
        "envs": st.sampled_from(["", "A=1,2,B=x=y", "PATH=/a:/b"]),
    },
)


@given(specs)
def test_a_job_survives_json(flags: dict[str, object]) -> None:
    spec = JobSpec.from_flags("train", flags)
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("document", ["[", "[]", "{}", '{"job_type": "dance"}', '{"job_type": "train", "colour": 1}'])
def test_what_is_no_job_is_refused(document: str) -> None:
    with pytest.raises(FlagError):
        JobSpec.from_json(document)


@pytest.mark.parametrize(
    "name",
    ["output", "checkpoint_dir", "checkpoint_dir_for_init", "bad_records_dir", "job_dir", "tensorboard_log_dir",
     "model_zoo", "yaml", "cluster_spec", "log_file_path"],
)  # fmt: skip
def test_a_path_that_no_file_system_holds_is_refused_with_its_flag(name: str) -> None:
    for path, said in (("/tmp/" + "x" * 300, "more than 255 bytes"), ("/ab" * 2000, "longer than the 4000 bytes")):
        with pytest.raises(FlagError, match=rf"--{name}=.*{said}"):
            JobSpec.from_flags("train", {**LOCAL, name: path})
    JobSpec.from_flags("train", {**LOCAL, name: "/tmp/" + "x" * 255})


def test_a_model_def_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(FlagError, match=r"--model_def=.*more than 255 bytes"):
        JobSpec.from_flags("train", {**LOCAL, "model_def": "m" * 300 + ".model"})


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        ({}, 8),
        ({"processes_per_worker": 8}, 8),
        ({"worker_resource_limit": "amd.com/gpu=8,memory=64Gi", "worker_resource_request": "cpu=8"}, 8),
        ({"worker_resource_request": "cpu=8"}, 1),
        ({"runtime": "local"}, 1),  # nothing is asked for
        ({"worker_resource_request": "cpu=8", "processes_per_worker": 3}, 3),
        ({"model_def": "", "job_command": "python train.py", "processes_per_worker": 2}, 2),
        ({"worker_resource_request": "cpu=8,gpu=1", "envs": "CUDA_VISIBLE_DEVICES=0"}, 1),
        ({"model_def": "", "job_command": "python train.py", "distribution_strategy": "ParameterServerStrategy"}, 1),
    ],
)
def test_each_gpu_of_a_worker_gets_a_process_unless_the_flags_say_otherwise(
    flags: dict[str, object], number: int
) -> None:
    given = {name: value for name, value in (LOCAL | GPUS | flags).items() if value}
    assert JobSpec.from_flags("train", given).num_processes_per_worker == number


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"processes_per_worker": 16}, "more than the 8 GPUs"),
        ({"processes_per_worker": 2}, "some would be idle"),
        ({"processes_per_worker": 1}, "some would be idle"),
        ({"model_def": "", "job_command": "python train.py", "processes_per_worker": 3}, "some would be idle"),
        ({"distribution_strategy": "Local"}, "all but one would be idle"),
        ({"worker_resource_request": "cpu=8,nvidia.com/mig-1g.10gb=2"}, "one MIG device"),
        ({"distribution_strategy": "Local", "worker_resource_request": "cpu=1", "processes_per_worker": 2}, "is 2"),
        ({"envs": "A=1,CUDA_VISIBLE_DEVICES=0"}, "--envs has CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_would_be_idle_are_refused(flags: dict[str, object], said: str) -> None:
    given = {name: value for name, value in (LOCAL | GPUS | flags).items() if value}
    with pytest.raises(FlagError, match=said):
        JobSpec.from_flags("train", given)
