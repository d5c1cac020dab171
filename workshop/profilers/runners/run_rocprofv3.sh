#!/usr/bin/env bash
# rocprofv3 (AMD): which kernels take the time, when does each run, what does it move and compute?
# Three modes, one after the other: hotspots, timeline, counters. From ROCm 7.0 on one run does for
# hotspots and timeline: its database has both.
#
# Usage: ./run_rocprofv3.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=profile_lib.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/profile_lib.sh"
MODES="hotspots timeline counters"
CLASS_MODE=hotspots CLASS_FORM="one step, one run of the program, 2 minutes"
begin "$@"
need_gpu amd
need rocprofv3 "it comes with ROCm 6.3 and later, in /opt/rocm/bin"

# What this version has, its help lists.
help=$({ rocprofv3 --help || true; } 2>/dev/null)
[[ -n $help ]] || note "rocprofv3 is not here to list its options: these are the newest version's options"
has() { [[ -z $help || $help == *"$1"* ]]; } # has WORD
has_for() { # has_for MODE OPTION
  if has "$2"; then return; fi
  [[ $MODE != "$1" ]] || skip "$1: rocprofv3 has no $2 before ROCm 6.3"
  note "left out $1: rocprofv3 has no $2 before ROCm 6.3"
  return 1
}

# PyTorch's own profiler must not run at the same time: both need exclusive use of the same library,
# and the program hangs or dies. The files' names hold %pid%, the process's number, because the
# compiler's helper processes write files too. Kernels keep their whole names: cut short, those that
# differ in a type or a size become one.
to() { # to FOLDER FORMAT: sets `output`
  output=(--output-format "$2" --output-directory "$OUT/$1" --output-file run_%pid%)
}

# The trace has HIP's calls and the markers beside kernels and copies: they cost the host some time
# and the kernels none, and the table can show which part of the step launched a kernel. The format
# that stays is the database (rocpd, in SQLite), from ROCm 7.0 on: CSV and pftrace are deprecated.
table=rocpd
if ! has rocpd; then table=csv; fi
if [[ $table == rocpd && $MODE != counters ]]; then
  folder=hotspots
  if [[ $MODE == timeline ]]; then folder=timeline; fi
  to "$folder" rocpd
  run rocprofv3 --runtime-trace "${output[@]}" -- "${TRAIN[@]}"
  timelines "*.db" "for ui.perfetto.dev: rocpd convert -i FILE -f pftrace"
elif wanted hotspots; then
  to hotspots csv
  run rocprofv3 --kernel-trace --stats --memory-copy-trace --hip-runtime-trace --marker-trace \
    "${output[@]}" -- "${TRAIN[@]}"
fi
if [[ $table == csv ]] && wanted timeline && has_for timeline --runtime-trace; then
  to timeline pftrace
  run rocprofv3 --runtime-trace "${output[@]}" -- "${TRAIN[@]}"
  timelines "*.pftrace" "open it in ui.perfetto.dev"
fi

# A pass holds 8 counters of the shaders and 4 of the L2 cache, so there is a run for each group.
collect() { # collect GROUP COUNTER...
  to "counters/$1" "$table"
  attempt "counters, $1" rocprofv3 --pmc "${@:2}" "${output[@]}" -- "${TRAIN[@]}"
}

if wanted counters && has_for counters --pmc; then
  architecture=$(amd_architecture)
  if [[ -z $architecture && $DRY_RUN == yes ]]; then
    architecture=gfx942
    note "no AMD GPU here: these are the counters of gfx942, the MI300 series"
  fi
  read_bytes=(FETCH_SIZE)
  matrix=(SQ_INSTS_VALU_MFMA_MOPS_{F16,BF16,F32,F64})
  case $architecture in
    gfx90a) ;; # MI200 series
    gfx942) matrix+=(SQ_INSTS_VALU_MFMA_MOPS_F8) ;;
    gfx950) # MI350 series; ROCm before 10 takes its 128-byte reads for 64 bytes in FETCH_SIZE
      read_bytes=(TCC_EA0_RDREQ_{32B,64B,128B}_sum)
      matrix+=(SQ_INSTS_VALU_MFMA_MOPS_{F8,F6F4})
      ;;
    *)
      [[ $MODE != counters ]] || skip "no counters are chosen for ${architecture:-this GPU}"
      note "no counters are chosen for ${architecture:-this GPU}; rocprofv3 --list-avail lists them"
      architecture=""
      ;;
  esac
  if [[ -n $architecture ]]; then
    collect read "${read_bytes[@]}"
    collect written WRITE_SIZE
    collect vector SQ_INSTS_VALU_{ADD,MUL,TRANS,FMA}_{F16,F32}
    collect vector64 SQ_INSTS_VALU_{ADD,MUL,TRANS,FMA}_F64
    collect matrix "${matrix[@]}"
    collect waves SQ_WAVES SQ_WAVE_CYCLES SQ_BUSY_CU_CYCLES
  fi
fi

# Perfetto's file alone has no table.
[[ $table == csv && $MODE == timeline ]] || show
