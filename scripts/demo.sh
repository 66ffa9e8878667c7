#!/usr/bin/env bash
# The main job on real data, on this machine: `make demo`.  Expects `elasticdl` and its Python on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/demo}
say() { printf '\n==> %s\n' "$*"; }

say "scikit-learn's handwritten digits (1,797 real scans of 8 × 8 pixels) become RecordIO files in $out/data"
rm -rf "$out"
python scripts/gen_dataset.py digits --output "$out/data" --records_per_shard 256

say "a job of one master, one parameter server and two workers, each a process of its own"
elasticdl train --runtime=local --job_name="demo-digits" --job_dir="$PWD/$out/job" \
    --model_zoo=model_zoo --model_def=digits.digits_functional.custom_model \
    --training_data="$out/data/train" --validation_data="$out/data/validation" \
    --distribution_strategy=ParameterServerStrategy --num_ps_pods=1 --num_workers=2 \
    --num_epochs=15 --minibatch_size=32 --num_minibatches_per_task=4 --evaluation_steps=200 \
    --log_loss_steps=100 --seed=1 --output="$PWD/$out/model"

say "the evaluations as the master logged them, on digits that were never trained on"
grep -h 'Evaluation metrics' "$out/job/logs/"*-master.log

say "the exported SavedModel in plain TensorFlow, on the same digits"
python scripts/show_digits.py --model "$out/model" --data "$out/data/validation" --at_least 0.95 \
    2>"$out/show.err" || { cat "$out/show.err" >&2; exit 1; }
say "done: the model is in $out/model, the logs of every process in $out/job/logs"
