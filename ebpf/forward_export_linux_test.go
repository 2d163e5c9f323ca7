package ebpf

// UseClsact attaches the fast path as on kernels without tcx.
func (e *Engine) UseClsact() { e.forward.clsact = true }
