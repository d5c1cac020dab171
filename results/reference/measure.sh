#!/usr/bin/env bash
# Measures what the documents show of a device: comparisons, waterfalls, sweeps, profiles, kernels,
# the labs, into a folder like those beside this script.
#
# Usage: results/reference/measure.sh FOLDER [STUDY ...]
#
# Without a STUDY all of them, which takes an H200 hours. Several GPUs share the work, a study at
# a time each; CUDA_VISIBLE_DEVICES says which to use. A study begins with the compilers' caches
# empty, since what the first use of a version costs is measured too.
#
# PYTHON names the Python to run (default: python). Exit status: 0 done, 1 something failed (the
# rest was measured), 2 wrong usage, 77 no GPU that this Python's PyTorch can use, 130 interrupted.
set -euo pipefail
unset CDPATH

# Those that take long are first, so that several GPUs end together.
STUDIES=(large ladder profiles cifar10 pipeline text_generation inference_networks inference_ladder
  inference_compare inference_peers waterfall_v4 waterfall_v3 sweep_seq_len once inference_training
  sweep_hidden_dim sweep_batch_size float8 kernels inference_ops inference_profiles harness ceilings
  determinism scale_out)
VERSIONS=(v1 v2 v3 v4)
PEERS=(hf hf-graph hf-liger)
PYTHON=${PYTHON:-python}
STATUS=0

fail() { # fail STATUS MESSAGE
  echo "error: $2" >&2
  exit "$1"
}

# try COMMAND...: 77 says that this machine does not have what it needs.
try() {
  local status=0
  "$@" || status=$?
  case $status in
    0 | 77) ;;
    130) exit 130 ;;
    *)
      echo "failed with status $status: $*" >&2
      STATUS=1
      ;;
  esac
}

compare() {
  try "$PYTHON" analysis_tools/compare_versions.py --output-dir "$@"
}

# One process a version.
once() {
  compare "$FOLDER/once" --repeats 1 --num-steps 10 "$@"
}

waterfall() {
  local preset
  for preset in small medium; do
    compare "$FOLDER/waterfall_$1" --waterfall "$1" --config "$preset" --precision bf16 \
      --num-steps 15 --jobs 4
  done
}

sweep() {
  compare "$FOLDER/$1" --sweep "${@:2}" --config small --precision bf16 \
    --versions "${VERSIONS[@]}" --repeats 1 --num-steps 10
}

# lab NAME PROGRAM FLAGS: a lab's own table.
lab() {
  try "$PYTHON" "labs/$1/$2" --output-dir "$FOLDER/$1" "${@:3}"
}

# infer NAME FLAGS: a study of the inference benchmark.
infer() {
  try "$PYTHON" labs/inference_benchmark/micro_benchmarking_pytorch.py \
    --output-dir "$FOLDER/inference_benchmark/$1" --network "${@:2}"
}

operators() {
  try "$PYTHON" labs/inference_benchmark/TorchTensorOpsBench/torch_tensor_ops_bench.py \
    --output-dir "$FOLDER/inference_benchmark/$1" "--run-${1//_/-}"
}

# Of a profile the hot list is kept. Tools that read counters run each kernel many times, so that
# they get two layers.
profile() {
  local version=$1 folder tool raw=$RAW/$1
  folder=$(echo version"${version#v}"_*)
  run_profiler "$PYTHON" run_pytorch_profiler.py
  for tool in ncu rocprofv3 proton; do
    run_profiler bash "run_$tool.sh" --num-layers 2
  done
}

run_profiler() {
  local tool=${2#run_}
  tool=${tool%.*}
  PYTHON=$PYTHON try "$1" "$folder/$2" --output-dir "$raw/$tool" -- \
    --config medium --precision bf16 "${@:3}"
  keep "$raw/$tool" "$FOLDER/profiles/$version/$tool"
}

# keep PROFILE TO: its hot list and what was profiled.
keep() {
  if [[ -f $1/kernels.json ]]; then
    mkdir -p "$2"
    cp "$1/kernels.json" "$1/run.jsonl" "$2/"
  fi
}

# What the exercises of the inference benchmark show to those who have no GPU.
profile_inference() {
  try "$PYTHON" labs/inference_benchmark/run_pytorch_profiler.py --output-dir "$RAW/$1" -- \
    --network resnet50 --batch-size 32 --precision "$1"
  keep "$RAW/$1" "$FOLDER/inference_benchmark/profiles/$1"
}

measure() {
  local version batch set precision sizes
  export TORCHINDUCTOR_CACHE_DIR=$RAW/caches/$1/inductor TRITON_CACHE_DIR=$RAW/caches/$1/triton
  case $1 in
    ladder)
      compare "$FOLDER" --config small medium large --precision bf16 --repeats 5 \
        --versions "${VERSIONS[@]}" "${PEERS[@]}"
      compare "$FOLDER" --config long --precision bf16 --jobs 5 \
        --versions v1 v3 v4 hf-graph hf-flash
      ;;
    float8)
      # Gates at large need most of the memory. One process each, or their bf16 would replace the
      # ladder's.
      for sizes in "small medium --jobs 4" large; do
        # shellcheck disable=SC2086 # words of one line
        compare "$FOLDER/float8" --config $sizes --precision bf16 fp8 fp8-rowwise \
          --versions "${VERSIONS[@]}" torchao --repeats 1
      done
      ;;
    once)
      once --config small medium --precision fp32 tf32 fp16 --versions "${VERSIONS[@]}"
      ;;
    large) once --config large --precision fp32 tf32 fp16 --versions "${VERSIONS[@]}" ;;
    waterfall_*) waterfall "${1#waterfall_}" ;;
    sweep_seq_len) sweep sweep_seq_len seq-len 128 ... 8192 ;;
    sweep_batch_size) sweep sweep_batch_size batch-size 16 64 256 1024 4096 16384 ;;
    sweep_hidden_dim) sweep sweep_hidden_dim hidden-dim 256 ... 4096 ;;
    profiles) for version in "${VERSIONS[@]}"; do profile "$version"; done ;;
    # What the lab's README and CHECKLIST.md quote: its documents.py finds it by network, batch and
    # study.
    inference_ladder)
      for batch in 1 32 256; do
        infer "ladder_$batch" resnet50 --batch-size "$batch" --ladder --jobs 9
      done
      ;;
    inference_peers)
      for batch in 32 256; do
        infer "peers_$batch" resnet50 --batch-size "$batch" --fp16 1 --compare peers
      done
      ;;
    inference_compare)
      infer precision resnet50 --batch-size 32 --compare precision
      infer batch_size resnet50 --batch-size 32 --compare batch-size
      ;;
    inference_training)
      infer training densenet121 --batch-size 2048 --mode training --precision bf16 \
        --channels-last --compare compile --compile
      ;;
    inference_networks) infer networks all --batch-size 32 --fp16 1 --jobs 16 ;;
    inference_profiles) for precision in fp32 fp16; do profile_inference "$precision"; done ;;
    inference_ops) for set in predefined model_ops; do operators "$set"; done ;;
    # With a learning rate of 0.1 some trainings of ResNet-34 on digits diverge.
    cifar10)
      lab cifar10_roofline measure_table.py --jobs 9 -- --epochs 2 --epoch-images 50000 --lr 0.02
      ;;
    pipeline)
      lab data_pipeline measure_pipeline.py --steps all --iterations 100 --resnet-images 8192 \
        --epochs 2 --jobs 6
      ;;
    text_generation) lab text_generation measure_engines.py --jobs 9 ;;
    scale_out) lab scale_out measure.py --jobs 2 ;;
    kernels)
      try "$PYTHON" -m workshop.kernels.benchmark --output-dir "$FOLDER/kernels"
      try "$PYTHON" -m workshop.kernels.benchmark --output-dir "$FOLDER/kernels_drawn" --drawn 20
      ;;
    determinism)
      try "$PYTHON" -m workshop.determinism --config medium --precision bf16 --jobs 4 \
        --output-dir "$FOLDER"
      ;;
    ceilings) try "$PYTHON" analysis_tools/roofline_analysis.py --measure --results "$FOLDER" ;;
    harness)
      try "$PYTHON" -m pytest tests/test_gpu.py -k harness --keep-figures "$FOLDER/harness"
      ;;
  esac
}

# share STUDY...: each GPU takes the next study as soon as it is free, and says whose line it prints.
share() {
  local status=0
  # shellcheck disable=SC2016 # the inner shell is to expand them
  printf '%s\n' "$@" | xargs -n 1 -P "$(wc -w <<<"$GPUS")" --process-slot-var=SLOT \
    bash -o pipefail -c '
      gpus=($GPUS)
      CUDA_VISIBLE_DEVICES=${gpus[SLOT]} bash "$0" "$1" "$2" 2>&1 | sed -u "s/^/$2: /"
      status=$?
      [[ $status != 130 ]] || exit 255 # xargs begins no other then
      exit "$status"' "$SCRIPT" "$FOLDER" || status=$?
  case $status in
    0) ;;
    124 | 130) exit 130 ;;
    *) STATUS=1 ;;
  esac
}

if [[ ${1:-} == --help ]]; then
  sed -n '2,/^set/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" # the first comment
  echo "Studies: ${STUDIES[*]}"
  exit
fi
[[ $# -ge 1 && $1 != -* ]] || fail 2 "usage: $0 FOLDER [STUDY ...], of ${STUDIES[*]}"
for study in "${@:2}"; do
  [[ " ${STUDIES[*]} " == *" $study "* ]] ||
    fail 2 "unknown study '$study': choose from ${STUDIES[*]}"
done
command -v "$PYTHON" >/dev/null || fail 2 "no $PYTHON here: set PYTHON to one that has PyTorch"
if [[ $PYTHON == */* ]]; then PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/${PYTHON##*/}; fi
COUNT=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null) || COUNT=0
[[ $COUNT != 0 ]] || fail 77 "no GPU that $PYTHON's PyTorch can use: the reference is measured on one"
GPUS=${CUDA_VISIBLE_DEVICES:-$(seq -s ' ' 0 $((COUNT - 1)))}
export GPUS=${GPUS//,/ }
mkdir -p "$1" 2>/dev/null || fail 2 "$1: no folder can be made there"
FOLDER=$(cd "$1" && pwd)
SCRIPT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/measure.sh
shift
[[ $# -gt 0 ]] || set -- "${STUDIES[@]}"
RAW=$(mktemp -d)
trap 'rm -rf "$RAW"' EXIT
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OTHERS=()
for study in "$@"; do
  if [[ $study != scale_out ]]; then
    OTHERS+=("$study")
  elif [[ $COUNT -gt 1 ]]; then # it takes all GPUs: no other study runs beside it
    measure scale_out
  else
    echo "scale_out: left out, since it takes several GPUs" >&2
  fi
done
if [[ $COUNT -gt 1 && ${#OTHERS[@]} -gt 1 ]]; then
  share "${OTHERS[@]}"
else
  for study in "${OTHERS[@]+"${OTHERS[@]}"}"; do
    measure "$study"
  done
fi
exit "$STATUS"
