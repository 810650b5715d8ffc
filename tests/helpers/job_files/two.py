import good

small = good.job.replace(batch=8)
large = good.job.replace(batch=64)
