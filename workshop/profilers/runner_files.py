"""The files that a runner leaves beside a profile of any tool."""

COMMAND_FILE = "command.txt"
"""In every folder that a runner fills: what was run. profile_lib.sh writes it, and profile_run for
Python. A folder may be replaced if its first line begins with COMMAND_MARK."""
COMMAND_MARK = "# run_"
RUN_FILE = "run.jsonl"
"""The record of what was profiled: a results.RunResult, or a labs.LabRun."""
