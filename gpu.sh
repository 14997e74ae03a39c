export PYTHONPATH=$PWD/src TRITON_CACHE_DIR=/tmp/house_triton
PY=${PYTHON:-python3}
echo "start $(date +%T)"
cat > $OUT/study.py <<'P'
import sys, json, time, statistics, random
import torch
from fused_softmax.lab.roofline import session, profile as P
from fused_softmax.lab.bench.cases import random_widths
SEED = 20261122
W10, W6 = random_widths(10, SEED, 1024, 262144), random_widths(6, SEED + 1, 1024, 262144)
SMALL_W, SMALL_E = (1024, 4096, 32768, 262144), (2**12, 2**16, 2**20, 2**22, 2**24, 2**25, 2**26)
OURS = "fused_softmax"
MAIN = [(op, d, n) for op in ("softmax", "log_softmax") for d in ("bfloat16", "float32") for n in W10]
MAIN += [(op, d, n) for op in ("softmax_backward", "logsumexp") for d in ("bfloat16", "float32") for n in W6]
REST = [(op, "bfloat16", n) for op in P.EXPLAINED if op not in ("softmax", "log_softmax", "softmax_backward", "logsumexp") for n in W6]
SMALL = [(op, "bfloat16", n, e) for op in ("softmax", "logsumexp", "softmax_backward") for n in SMALL_W for e in SMALL_E]
def one(r):
    system, op, d, n = r
    try:
        t = time.time()
        c, a = P.runnable(system, op, min(4096, n) if "masked" in op or system == "14_masks" else 64, n, getattr(torch, d), torch.device("cuda"))
        c(*a); torch.cuda.synchronize()
        return ""
    except Exception as e:
        return f"{r}: {type(e).__name__} {str(e)[:200]}"
def warm():
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    runs = {(s, o, "bfloat16", n) for s, o, n in P.default_runs()}
    runs |= {(OURS, o, d, n) for o, d, n in (*MAIN, *REST)} | {(OURS, o, d, n) for o, d, n, _ in SMALL}
    runs = sorted(runs, key=lambda r: (r[0] == OURS, -r[3]))
    t = time.time()
    with ProcessPoolExecutor(16, mp_context=get_context("spawn")) as pool:
        for said in pool.map(one, runs):
            if said: print(said, flush=True)
    print("warm", len(runs), round(time.time() - t), "s", flush=True)
def timed(calls, n=15, flush=None, ticks=20000):
    ev = {k: [] for k in calls}
    for i in range(n + 2):
        for k, f in calls.items():
            if flush is not None: flush.fill_(1)
            torch.cuda._sleep(ticks)
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); f(); b.record()
            if i > 1: ev[k].append((a, b))
        torch.cuda.synchronize()
    return {k: 1e3 * statistics.median(a.elapsed_time(b) for a, b in v) for k, v in ev.items()}
def study():
    from fused_softmax.lab.roofline.predict import predict
    from fused_softmax.lab.bench.ceilings import ceiling
    from fused_softmax.lab.bench.inputs import DTYPES
    dev = torch.device("cuda"); out = []
    worst = {}
    for op, d, n in (*MAIN, *REST):
        rows = max(1, 2**27 // n)
        try:
            said = predict(OURS, rows, n, d, "h200", op)
            c, a = P.runnable(OURS, op, rows, n, DTYPES[d], dev)
            plain, moved = ceiling(said.passes, a[0])
            f = timed({"it": lambda: c(*a), "plain": lambda: plain(*a)}, 11, ticks=400000)
        except Exception as e:
            print(op, d, n, type(e).__name__, str(e)[:150], flush=True); continue
        rec = dict(op=op, dtype=d, n_rows=rows, n_cols=n, floor=said.floor.least, binds=said.floor.binds, by=dict(said.floor.microseconds), it=f["it"], plain=f["plain"] * said.dram.all / moved)
        out.append(rec); worst.setdefault((op, d), []).append((round(f["it"] / said.floor.least, 3), n))
        del c, a, plain
    for k, v in worst.items(): print(*k, *[f"{n}:{o}" for o, n in v], flush=True)
    json.dump(out, open(sys.argv[2] + "/study.json", "w"))
    flush = torch.empty(2**28, dtype=torch.uint8, device=dev)
    nothing = torch.zeros(1, device=dev)
    small = []
    import triton, triton.language as tl
    for op, d, n, e in SMALL:
        rows = max(1, e // n)
        try:
            said = predict(OURS, rows, n, d, "h200", op)
            c, a = P.runnable(OURS, op, rows, n, DTYPES[d], dev)
            plain, moved = ceiling(said.passes, a[0])
            g = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                c(*a)
                torch.cuda.synchronize()
                with torch.cuda.graph(g, stream=side): c(*a)
            f = timed({"it": lambda: c(*a), "graph": g.replay, "plain": lambda: plain(*a), "nothing": lambda: nothing.fill_(0)}, 15, flush, 150000)
        except Exception as ex:
            print(op, d, n, e, type(ex).__name__, str(ex)[:150], flush=True); continue
        small.append(dict(op=op, n_rows=rows, n_cols=n, floor=said.floor.least, binds=said.floor.binds, by=dict(said.floor.microseconds), dram=said.dram.all, **f))
        print(op, rows, n, said.floor.binds, *[round(v, 1) for v in (said.floor.least, f["it"], f["graph"], f["plain"] * said.dram.all / moved, f["nothing"])], flush=True)
        del c, a, plain, g
    json.dump(small, open(sys.argv[2] + "/small.json", "w"))
if __name__ == "__main__":
    {"warm": warm, "study": study}[sys.argv[1]]()
P
timeout 45 $PY $OUT/study.py warm; echo "$(date +%T)"
L=01_naive,02_one_row,03_driver,04_persistent,05_published,05_vectorized,06_three_pass,07_online,08_many_rows,09_cluster,11_over_gpus,12_gradient,13_cross_entropy,14_masks,15_another_dimension,16_one_idea_at_a_time
said() { grep -c "claim held" $1; grep -B3 "did not hold" $1; tail -1 $1; }
timeout 60 $PY -m fused_softmax profile --elements 536870912 --systems $L --record $OUT/profile.json > $OUT/profile.txt 2>&1; echo "profile rc $? $(date +%T)"; said $OUT/profile.txt
timeout 40 $PY $OUT/study.py study $OUT > $OUT/study.txt 2>&1; cat $OUT/study.txt; echo "study $(date +%T)"
timeout 60 $PY -m fused_softmax profile --elements 536870912 --systems fused_softmax --record $OUT/profile_ops.json > $OUT/profile_ops.txt 2>&1; echo "ops rc $? $(date +%T)"; said $OUT/profile_ops.txt
rm -f $OUT/study.py
