import good

small, large = good.job.replace(batch=8), good.job.replace(batch=64)
