"""Main loop of the kubelet: pod changes, runtime events, probe results and ticks, with one worker per pod."""
