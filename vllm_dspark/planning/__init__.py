"""Verification scheduling in pure numpy: no torch, no vLLM, deterministic.

    survival     which confidence rows may be used, and what they say
    posterior    running acceptance per position and per request
    calibration  sequential temperature scaling; online: bounded correction
    cost         measured step times; online_cost: their correction while serving
    budget       how many drafts to verify in all (argmax of goodput)
    allocation   which drafts those are, and the ragged layout that follows
    repeat       when the previous decision is the next one too
    settle       a plan restated for the step that was really scheduled
    observed     a cost table from served steps, where measuring was refused
    table        per-request state, one slot per request
    planner      the state machine that turns all of it into a VerifyPlan

Arrays are position-major, [K, n]: row k holds draft position k of every request.
Their C order is then the tie order of allocation, (position, request).
"""
