package proxier

import v1 "k8s.io/api/core/v1"

// warnOfLocalhost warns if node ports should be accepted at localhost, and the engine cannot.
func (f *family) warnOfLocalhost() {
	if !f.config.localhostNodePorts(f.name) {
		return
	}
	traits := f.engine.Traits(nil)
	if byRules := traits.LoopbackNodePorts && f.name == v1.IPv4Protocol; !byRules && !traits.LocalhostSockets {
		f.log.Warn("node ports are not accepted at localhost, the engine cannot: see package userspace/localhost")
	}
}
