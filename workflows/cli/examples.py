"""One example for each verb, shown below its help; a test parses them all."""

from __future__ import annotations

EXAMPLES = {
    "inspect": "shardwright inspect hf://org/model@main --output json",
    "plan": "shardwright plan CKPT --cluster h200-8 --recipe recipe.yaml -o plan.json --report plan.html",
    "review": 'shardwright review plan.json --edit mesh.ep=2 --reason "fewer gathers"',
    "apply": "shardwright apply plan.json --checkpoint CKPT --run-dir runs/first --preflight",
    "adapt": "shardwright adapt CKPT -c h200-8 -r recipe.yaml --headless --policy policy.yaml --reports reports",
    "status": "shardwright status runs/first --output json",
    "logs": "shardwright logs runs/first --follow",
    "resume": "shardwright resume runs/first",
    "cancel": "shardwright cancel runs/first --timeout 120",
    "show": "shardwright show plan.json --json",
    "explain": "shardwright explain plan.json memory",
    "diff": "shardwright diff plan.json other.json --output markdown",
    "calibrate": "shardwright calibrate -o calibration.json",
    "profile": "SHARDWRIGHT_PROFILE_STEP=3 shardwright apply plan.json --checkpoint CKPT --run-dir runs/first && "
    "shardwright profile runs/first",
    "simulate": "shardwright simulate plan.json --checkpoint CKPT",
    "export": "shardwright export runs/first --format per-expert",
    "generate": 'shardwright generate CKPT --adapter runs/first/adapter --prompt "def "',
    "doctor": "shardwright doctor --output json",
    "watch": "shardwright watch models -c h200-8 -r recipe.yaml --policy policy.yaml --once",
    "cluster detect": "shardwright cluster detect -o cluster.yaml",
    "cluster init": "shardwright cluster init mine --ranks 2",
    "kernels verify": "shardwright kernels verify rms_norm router",
    "kernels bench": "shardwright kernels bench rms_norm --evidence evidence.jsonl",
    "kernels tune": "shardwright kernels tune rms_norm",
    "kernels prebuild": "shardwright kernels prebuild --device nvidia-h200",
    "kernels write": "shardwright kernels write plan.json --region PROPOSAL --policy policy.yaml --checkpoint CKPT",
    "kernels approve": "shardwright kernels approve written-kernels/KERNEL.json --sha256 HASH",
    "policy test": "shardwright policy test policy.yaml plan.json --expect approve",
    "runs": "shardwright runs --root runs",
    "runs show": "shardwright runs show runs/first",
    "runs fork": "shardwright runs fork runs/first --at search --to runs/second",
}
