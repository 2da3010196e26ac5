"""Results of a run. cells, batch_statistics, summary and warnings make summary.json; rescore
applies changed scorers without any call; rejudge asks new judges or uses new prompts."""
