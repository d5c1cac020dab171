#!/usr/bin/env bash
# rocprofv3 (AMD): which kernels take the time, when does each run, what does it move and compute?
# Three modes, one after the other: hotspots, timeline, counters.
#
# Usage: ./run_rocprofv3.sh [options] [-- flags of the model]

# shellcheck source-path=SCRIPTDIR source=../workshop/profile_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../workshop/profile_lib.sh"
MODES="hotspots timeline counters"
begin "$@"
need_gpu amd
need rocprofv3 "it comes with ROCm 6.2 and later, in /opt/rocm/bin"

# PyTorch's own profiler must not run at the same time: both want the same library to themselves,
# and the program hangs or dies. The files' names hold %pid%, the process's number, because the
# compiler's helper processes write files too.

# CSV has to be asked for since ROCm 7.0, which writes a database instead, without --stats. HIP's
# calls and the markers cost the host some time and the kernels none; with them the table can tell
# which part of the step launched a kernel.
if wanted hotspots; then
  run rocprofv3 --kernel-trace --stats \
    --memory-copy-trace --hip-runtime-trace --marker-trace \
    --output-format csv --output-directory "$OUT/hotspots" --output-file run_%pid% -- "${TRAIN[@]}"
fi

# Kernels, copies, HIP's calls and the markers, on one time axis.
if wanted timeline; then
  run rocprofv3 --runtime-trace \
    --output-format pftrace --output-directory "$OUT/timeline" --output-file run_%pid% \
    -- "${TRAIN[@]}"
  timelines "*.pftrace" "open it in ui.perfetto.dev"
fi

# A pass holds 8 counters of the shaders and 4 of the L2 cache, so there is a run for each group.
collect() { # collect GROUP COUNTER...
  attempt "counters, $1" rocprofv3 --pmc "${@:2}" \
    --output-format csv --output-directory "$OUT/counters/$1" --output-file run_%pid% \
    -- "${TRAIN[@]}"
}

if wanted counters; then
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

# The timeline alone has no table.
[[ $MODE == timeline ]] || show
