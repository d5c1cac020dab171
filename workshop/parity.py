"""The gate: does a version train the same model as V1? Its public names; gate/ has the code.

python -m workshop.parity --version v2 --config tiny --precision fp32
"""

import sys

if __name__ == "__main__":  # PyTorch is not everywhere, and takes seconds to import
    from workshop.needed import import_torch

    import_torch()

from workshop.gate.parity import (
    ParityReport,
    canonical_gradients,
    check,
    load_canonical,
    main,
)

__all__ = ["ParityReport", "canonical_gradients", "check", "load_canonical", "main"]

if __name__ == "__main__":
    sys.exit(main())
