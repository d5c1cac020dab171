"""lm_gen.py with DeepSpeed-Inference: alone, under the deepspeed launcher or torchrun.

deepspeed --num_gpus 2 lm_gen_ds.py --model_path MODEL --input_file prompts.txt
torchrun --nproc-per-node 2 lm_gen_ds.py --model_path MODEL --input_file prompts.txt
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout needs no installation

if __name__ == "__main__":
    from workshop.needed import import_torch

    import_torch()

from labs.text_generation.lm_gen import main

if __name__ == "__main__":
    sys.exit(main(engine="deepspeed"))
