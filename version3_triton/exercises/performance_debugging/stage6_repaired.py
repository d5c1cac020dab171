#!/usr/bin/env python3
"""Stage 6: V3 as it is, after the faults of the five others were fixed."""

import sys

from debug_harness import main

# isort: split

import tiny_llama_v3 as v3

if __name__ == "__main__":
    sys.exit(main(__file__, v3.TinyLlama))
