#!/usr/bin/env bash
# PPO on Llama-3-70B, 8 nodes x 8 GPUs (docs/scale/launching.md). Arguments are overrides: trainer.total_training_steps=50
#
#   MODEL_PATH=... TRAIN_FILES=... VAL_FILES=... HOSTS="node0 ... node7" bash scripts/run_70b_ppo.sh   start Ray over ssh
#   RAY_ADDRESS=node0:6379 MODEL_PATH=... bash scripts/run_70b_ppo.sh                    join a Ray cluster
#   DRY_RUN=1 bash scripts/run_70b_ppo.sh       the whole plan and the commands of every node; starts nothing
#   REHEARSE=1 bash scripts/run_70b_ppo.sh      ranks of the run as on GPUs, without one (docs/plan/dry_run.md); RANKS, LAYERS
#   CHECK=1 ... bash scripts/run_70b_ppo.sh     the nodes alone: versions, GPUs, links, bandwidth; training checks them, too
#   SCALE=tiny bash scripts/run_70b_ppo.sh      the same configuration on 8 CPU processes, TP2 x PP2 x DP2, rollout TP1
#   STAGE=sft ... bash scripts/run_70b_ppo.sh   a task before PPO with a configuration of its own, all else alike
#
# The same command again goes on from the newest checkpoint. Exit codes are megatron-rl's; 2: this cannot work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAGE="${STAGE:-ppo}"           # ppo | sft | reward | dpo
SCALE="${SCALE:-70b}"           # 70b | tiny
DRY_RUN="${DRY_RUN:-0}"         # 1: print, start nothing
REHEARSE="${REHEARSE:-0}"       # 1: rehearse, start nothing
CHECK="${CHECK:-0}"             # 1: start Ray or join it, check the nodes, train nothing
RANKS="${RANKS:-}"              # of REHEARSE: all, or 0,20,63; empty: one of each pipeline stage
LAYERS="${LAYERS:-}"            # of REHEARSE: layers of each stage; empty: all
CONFIG="${CONFIG:-}"            # empty: the task's
PYTHON="${PYTHON:-$([[ -x .venv/bin/python ]] && echo "$PWD/.venv/bin/python" || echo python3)}" # the same on all nodes
MODEL_PATH="${MODEL_PATH:-}"    # Hugging Face folder, at the same place on all nodes; empty: the shape, DRY_RUN only
TRAIN_FILES="${TRAIN_FILES:-}"  # one file, or [a.parquet,b.parquet]
VAL_FILES="${VAL_FILES:-}"
OUTPUT_DIR="${OUTPUT_DIR:-}"    # on a file system that all nodes share; empty: the configuration's
RAY_ADDRESS="${RAY_ADDRESS:-}"  # host:port of a running Ray cluster; empty: start one on HOSTS, or on this machine
HOSTS="${HOSTS:-}"              # names of all nodes, this one first
RAY_PORT="${RAY_PORT:-6379}"
REMOTE_SHELL="${REMOTE_SHELL:-ssh -o BatchMode=yes}" # runs "$REMOTE_SHELL HOST COMMAND"
NODES_TIMEOUT="${NODES_TIMEOUT:-600}"                # seconds for all nodes to join
HARDWARE="${HARDWARE:-}"        # a100 | h100 | h200 | cpu | FILE.yaml, for the memory and time plan

case "$STAGE" in # configuration, command, role that is trained; nodes, TP and PP of the configuration; tiny files
ppo) OF_STAGE=(configs/llama3_70b_ppo.yaml train actor_rollout_ref.actor 8 8 4 assets/demo/{train,test}.parquet) ;;
sft) OF_STAGE=(configs/stages/llama3_70b_sft.yaml sft actor_rollout_ref.actor 4 8 4
    assets/demo_stages/answers_{train,test}.parquet) ;;
reward) OF_STAGE=(configs/stages/llama3_8b_reward.yaml reward critic 1 2 1
    assets/demo_stages/pairs_{train,test}.parquet) ;;
dpo) OF_STAGE=(configs/stages/llama3_70b_dpo.yaml dpo actor_rollout_ref.actor 8 8 4
    assets/demo_stages/pairs_{train,test}.parquet) ;;
*)
    echo "STAGE=$STAGE must be ppo, sft, reward or dpo; try: STAGE=ppo" >&2
    exit 2
    ;;
esac
OWN_CONFIG="$CONFIG"
CONFIG="${CONFIG:-${OF_STAGE[0]}}"
ROLE="${OF_STAGE[2]}"

case "$SCALE" in
70b)
    NNODES="${NNODES:-${OF_STAGE[3]}}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
    TP="${TP:-${OF_STAGE[4]}}" PP="${PP:-${OF_STAGE[5]}}" ROLLOUT_TP="${ROLLOUT_TP:-8}"
    HARDWARE="${HARDWARE:-h100}"
    RESOURCE=GPU
    SHRUNK=()
    ;;
tiny)
    NNODES="${NNODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}" TP="${TP:-2}" PP="${PP:-2}" ROLLOUT_TP="${ROLLOUT_TP:-1}"
    HARDWARE="${HARDWARE:-cpu}"
    RESOURCE=CPU
    MODEL_PATH="${MODEL_PATH:-assets/llama3_70b_tiny}"
    TRAIN_FILES="${TRAIN_FILES:-${OF_STAGE[6]}}"
    VAL_FILES="${VAL_FILES:-${OF_STAGE[7]}}"
    OUTPUT_DIR="${OUTPUT_DIR:-outputs/llama3_70b_tiny$([[ "$STAGE" == ppo ]] || echo "_$STAGE")}"
    SHRUNK=(
        trainer.device=cpu
        data.train_batch_size=32
        "$ROLE.ppo_max_token_len_per_gpu=128"
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256
        trainer.total_training_steps=4
        trainer.test_freq=0
        trainer.val_before_train=false
        trainer.save_freq=1
    )
    if [[ "$STAGE" == ppo ]]; then
        SHRUNK+=(
            data.max_prompt_length=16
            data.max_response_length=8
            actor_rollout_ref.actor.ppo_mini_batch_size=16
            actor_rollout_ref.rollout.max_num_batched_tokens=2048
            actor_rollout_ref.rollout.kv_cache_memory_bytes=8388608
            actor_rollout_ref.rollout.update_weights_bucket_megabytes=1
            custom_reward_function.path=scripts/demo_reward.py
        )
    else
        SHRUNK+=(data.max_length=24)
        [[ "$STAGE" != reward ]] || SHRUNK+=(critic.forward_max_token_len_per_gpu=256)
    fi
    ;;
*)
    echo "SCALE=$SCALE must be 70b or tiny; try: SCALE=70b" >&2
    exit 2
    ;;
esac

if ! "$PYTHON" -c "import typer, omegaconf" 2> /dev/null; then
    echo "PYTHON=$PYTHON lacks the packages that this program needs; run first: make install" >&2
    exit 2
fi

needs() { # needs VARIABLE KEY: whether a run lacks it: not set, not among the arguments, and no file of the configuration's
    local file
    file="$(sed -n "s/^  ${2##*.}: \([^ ]*\).*/\1/p" "$CONFIG" | head -1)"
    [[ -z "${!1}" && " ${ARGUMENTS[*]} " != *"$2="* && ! -e "$file" ]]
}
ARGUMENTS=("$@")
UNSET=()
if [[ "$SCALE" == 70b && -z "$OWN_CONFIG" && "$DRY_RUN" != 1 && "$REHEARSE" != 1 ]]; then
    [[ -n "$MODEL_PATH" || " $* " == *model.path=* ]] || UNSET+=(MODEL_PATH) # the configuration names the shape alone
    ! needs TRAIN_FILES data.train_files || UNSET+=(TRAIN_FILES)
    ! needs VAL_FILES data.val_files || UNSET+=(VAL_FILES)
fi
if ((${#UNSET[@]})); then
    echo "not set: ${UNSET[*]}. A run needs the folder of a model and files of data:" >&2
    echo "  MODEL_PATH=/models/llama-3-70b TRAIN_FILES=/data/train.parquet VAL_FILES=/data/test.parquet bash $0" >&2
    echo "The plan needs none of them: DRY_RUN=1 bash $0" >&2
    exit 2
fi

LAYOUT=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$GPUS_PER_NODE"
    "$ROLE.megatron.tensor_model_parallel_size=$TP"
    "$ROLE.megatron.pipeline_model_parallel_size=$PP"
)
[[ "$STAGE" != ppo ]] || LAYOUT+=(actor_rollout_ref.rollout.tensor_model_parallel_size="$ROLLOUT_TP")
PLACES=()
[[ -z "$MODEL_PATH" ]] || PLACES+=(actor_rollout_ref.model.path="$MODEL_PATH")
[[ -z "$TRAIN_FILES" ]] || PLACES+=(data.train_files="$TRAIN_FILES")
[[ -z "$VAL_FILES" ]] || PLACES+=(data.val_files="$VAL_FILES")
[[ -z "$OUTPUT_DIR" ]] || PLACES+=(trainer.default_local_dir="$OUTPUT_DIR")

SETTINGS=("${SHRUNK[@]}" "${LAYOUT[@]}" "${PLACES[@]}" "$@")
PLAN=("$PYTHON" -m megatron_rl plan --all --stage "$STAGE" --config "$CONFIG" --hardware "$HARDWARE" "${SETTINGS[@]}")
TRAIN=("$PYTHON" -m megatron_rl "${OF_STAGE[1]}" --config "$CONFIG" "${SETTINGS[@]}")
[[ "$CHECK" != 1 ]] || TRAIN=("$PYTHON" -m megatron_rl check-cluster --stage "$STAGE" --config "$CONFIG" "${SETTINGS[@]}")
[[ "$DRY_RUN" == 1 && -z "$MODEL_PATH" ]] && PLAN+=(--without-files)
if [[ "$REHEARSE" == 1 ]]; then
    exec "$PYTHON" -m megatron_rl rehearse --stage "$STAGE" --config "$CONFIG" ${RANKS:+--ranks "$RANKS"} \
        ${LAYERS:+--layers "$LAYERS"} "${SETTINGS[@]}"
fi

if [[ -n "$HOSTS" ]]; then
    read -r -a NODES <<<"$HOSTS"
    if [[ "${#NODES[@]}" != "$NNODES" ]]; then
        echo "HOSTS names ${#NODES[@]} machines and NNODES=$NNODES; try: NNODES=${#NODES[@]}" >&2
        exit 2
    fi
else
    NODES=()
    for ((node = 0; node < NNODES; node++)); do NODES+=("node$node"); done
fi
[[ "$RESOURCE" == GPU ]] && HAS=(--num-gpus="$GPUS_PER_NODE") || HAS=(--num-cpus="$GPUS_PER_NODE")
RAY=(env RAY_USAGE_STATS_ENABLED=0 RAY_enable_metrics_collection=0 PYTHONPATH="$PWD")
for name in RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH; do # of Ray's token authentication, which all nodes must agree on
    [[ -z "${!name:-}" ]] || RAY+=("$name=${!name}")
done
RAY+=("$PYTHON" -m ray.scripts.scripts)
CLUSTER="${RAY_ADDRESS:-${NODES[0]}:$RAY_PORT}"
RAY_HEAD=("${RAY[@]}" start --head --port="$RAY_PORT" --include-dashboard=false --no-monitor "${HAS[@]}")
RAY_WORKER=("${RAY[@]}" start --address="$CLUSTER" "${HAS[@]}")
WAIT=("$PYTHON" scripts/cluster/wait_for_nodes.py
    --nodes "$NNODES" --resource "$RESOURCE" --count "$GPUS_PER_NODE" --timeout "$NODES_TIMEOUT")

quoted() { printf '%q ' "$@"; }

print_commands() {
    echo "Commands, in $PWD on every node:"
    if [[ -n "$RAY_ADDRESS" ]]; then
        echo "# ${NODES[0]}, or any machine that reaches the running Ray cluster $RAY_ADDRESS"
    elif ((NNODES > 1)); then
        echo "# ${NODES[0]}"
        echo "$(quoted "${RAY_HEAD[@]}")"
        for node in "${NODES[@]:1}"; do
            echo "# $node"
            echo "$(quoted "${RAY_WORKER[@]}")"
        done
        echo "# ${NODES[0]}, when all have been given"
    else
        echo "# ${NODES[0]}; Ray is started on it, for this run"
    fi
    if [[ -n "$RAY_ADDRESS" ]] || ((NNODES > 1)); then
        echo "export RAY_ADDRESS=$CLUSTER"
        echo "$(quoted "${WAIT[@]}")"
    fi
    echo "$(quoted "${TRAIN[@]}")"
}

start_ray() { # head here, then the others; what is there already is joined
    if (exec 3<>"/dev/tcp/${NODES[0]}/$RAY_PORT") 2>/dev/null; then
        echo "joining the Ray cluster that runs at $CLUSTER"
        return
    fi
    "${RAY_HEAD[@]}"
    local -a remote
    read -r -a remote <<<"$REMOTE_SHELL"
    for node in "${NODES[@]:1}"; do
        "${remote[@]}" "$node" "cd $(quoted "$PWD") && $(quoted "${RAY_WORKER[@]}")"
    done
    echo "Ray goes on running when training has ended; to end it, on every node: $(quoted "${RAY[@]}" stop)"
}

if [[ "$SCALE" == tiny ]]; then
    "$PYTHON" scripts/make_tiny_model.py
    [[ "$STAGE" == ppo ]] || "$PYTHON" scripts/make_demo_preferences.py
fi
"${PLAN[@]}" # ends here with code 2 when something cannot work
if [[ "$DRY_RUN" == 1 ]]; then
    print_commands
    exit 0
fi
if [[ -z "$RAY_ADDRESS" ]] && ((NNODES > 1)); then
    if [[ -z "$HOSTS" ]]; then
        echo "NNODES=$NNODES needs HOSTS=\"node0 node1 ...\" (this machine first) or RAY_ADDRESS=host:port;" \
            "DRY_RUN=1 prints the commands of every node" >&2
        exit 2
    fi
    start_ray
    RAY_ADDRESS="$CLUSTER"
fi
if [[ -n "$RAY_ADDRESS" ]]; then
    export RAY_ADDRESS
    "${WAIT[@]}"
else
    unset RAY_ADDRESS # an empty one is no address
fi
exec "${TRAIN[@]}"
