#!/bin/sh
# Train with GRPO on this machine: servers, rollout workers and trainer.
#
#   launchers/grpo.sh [-n] MODEL TRAIN [EVAL] [key=value ...]
#
# -n           check the run and print its command, and start nothing
# MODEL        a Hugging Face folder
# TRAIN, EVAL  files of tasks (JSONL or Parquet), or "generated"; without EVAL nothing is validated
# key=value    options of train.py; they win over the values below
#
# Environment: SERVERS (1), WORKERS (1), GROUP (8 answers to a prompt), KL (0.04, the coefficient of
# the loss), SAMPLING="temperature top_p max_new_tokens" of training ("1.0 1.0 256"), and
# EVAL_SAMPLING of validation ("0.0 1.0 256": greedy), PYTHON (python3).
root=$(cd "$(dirname "$0")/.." && pwd)
usage() {
    sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
dry=
if [ "${1:-}" = -n ]; then
    dry=1
    shift
fi
for word in "${1:-=}" "${2:-=}"; do
    case $word in *=* | -*) usage ;; esac
done
model=$1 train=$2
shift 2
case ${1:-=} in
*=*) ;;
*) eval=$1 && shift ;;
esac
sampling() { # the options of one kind of sampling: PREFIX, and its three values
    [ $# -eq 4 ] || {
        echo "grpo.sh: $1 needs three values: temperature, top_p and max_new_tokens" >&2
        exit 2
    }
    echo "$1.temperature=$2 $1.top_p=$3 $1.max_new_tokens=$4"
}
# shellcheck disable=SC2086  # the values are words
own=$(sampling trainer.ppo.collector.sampling ${SAMPLING:-1.0 1.0 256}) || exit
# shellcheck disable=SC2086
held_out=$(sampling trainer.ppo.eval.sampling ${EVAL_SAMPLING:-0.0 1.0 256}) || exit
# shellcheck disable=SC2086
set -- --config "$root/config/async_ppo.yaml" --config "$root/config/algo/grpo.yaml" \
    "model.path=$model" "dataset.train=$train" ${eval:+"dataset.eval=$eval"} \
    "launcher.llm_servers=${SERVERS:-1}" "launcher.rollout_workers=${WORKERS:-1}" \
    "trainer.ppo.collector.group_size=${GROUP:-8}" "trainer.ppo.kl.coef=${KL:-0.04}" \
    $own $held_out "$@"
if [ -n "$dry" ]; then
    echo "${PYTHON:-python3} $root/train.py $*"
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m arealite.cli.main check "$@"
fi
exec "${PYTHON:-python3}" "$root/train.py" "$@"
