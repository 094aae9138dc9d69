"""The language-model engine: block pool, prefix cache, scheduler, runner, sampler, attention."""
