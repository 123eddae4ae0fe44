"""Draft, see run()."""
from __future__ import annotations
import statistics, time
import numpy as np, torch
from duplet_core.engine import Start
from duplet_core.messages import Sampling
from duplet_engine.gpu_engine import GpuEngine
from duplet_engine.sequences import open_prefill
from duplet_engine.shapes import SHAPES, random_weights
from duplet_pages.engine_config import EngineConfig

def run(say):
    dev=torch.device("cuda",0)
    config=SHAPES["s2-pro"]
    torch.set_grad_enabled(False)
    t=time.time(); w=random_weights(config,dev,torch.bfloat16); torch.cuda.synchronize(); say("weights",time.time()-t)
    t=time.time()
    eng=GpuEngine(EngineConfig("decode",pool_pages=20000,slots=128,chunk_rows=1500),config,w,"cumem-fd")
    say("engine up",time.time()-t,eng.memory.describe(),eng.config.pool_pages)
    rng=np.random.default_rng(0)
    def prompt(n):
        r=np.zeros((n,11),"<i4"); c=rng.integers(0,1024,(n,10)); r[:,0]=config.semantic_first+c[:,0]; r[:,1:]=c
        return r
    s=lambda seed:Sampling(seed,0.8,0.8,30,10)
    # prefill
    p=prompt(1500); pages=tuple(range(94))
    for i in range(4):
        q=open_prefill(config,Start(i,pages,p.tobytes(),0,0,s(1)),16,20000)
        torch.cuda.synchronize(); t=time.time(); row=eng.prefill_chunk(q); say("prefill 1500 ms",(time.time()-t)*1e3,row.tolist())
    a=torch.cuda.Event(enable_timing=True);b=torch.cuda.Event(enable_timing=True)
    a.record(); h=eng._forward(eng._kv,torch.from_numpy(p.astype("i8")),0); b.record(); b.synchronize(); say("prefill forward ms",a.elapsed_time(b), bool(torch.isfinite(h).all()))
    # same prompt decode-built: chunk consistency
    for count in (1,64,128):
        batch=eng.new_batch(); eng._state.positions.fill_(-1)
        for i in range(count):
            pg=tuple(range(i*150,i*150+150))
            batch.join(Start(i,pg,p[i:i+1].tobytes(),2048,300,s(i)))
        eng.decode_step(batch)
        from torch.profiler import profile, ProfilerActivity
        ts=[]
        for _ in range(20):
            a.record(); f=eng.launch_step(batch); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
        say("step",count,"ms",statistics.median(ts),min(ts),max(ts))
        if count in (1,64):
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                eng.decode_step(batch)
            agg=sorted(((e.key[:60],e.count,e.self_device_time_total) for e in prof.key_averages()),key=lambda e:-e[2])[:16]
            for e in agg: say("   ",e)
    # normal vs overlap
    outs=[]
    for ahead in (0,1):
        batch=eng.new_batch(); eng._state.positions.fill_(-1)
        for i in range(64):
            batch.join(Start(i,tuple(range(i*150,i*150+150)),p[i:i+1].tobytes(),2000,300,s(i)))
        fl=[];rows=[]
        torch.cuda.synchronize(); t=time.time()
        for step in range(40):
            fl.append(eng.launch_step(batch))
            if len(fl)>ahead: rows.append(eng.read_step(fl.pop(0))[0].clone())
        while fl: rows.append(eng.read_step(fl.pop(0))[0].clone())
        say("loop ahead",ahead,"ms/step",(time.time()-t)*1e3/40); outs.append(torch.stack(rows))
    say("overlap equal", torch.equal(*outs), "distinct rows", len(set(map(tuple,outs[0][:,:,0].flatten().view(-1,1).tolist()))))
    eng.close()
