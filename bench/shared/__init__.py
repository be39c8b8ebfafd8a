"""What all experiments share: the result file, rows that are trained by name, the page's opening."""
