package ipvs

import (
	"net/netip"
	"slices"
)

// openLeft opens what Leaving has in the kernel, nil if there is nothing.
func (e *Engine) openLeft() (*left, error) {
	l, err := openLeft(e)
	if err == nil && !l.record.exists {
		l.close()
		return nil, nil
	}
	return l, err
}

// findLeft looks for what Leaving has in the kernel.
func (e *Engine) findLeft() (err error) {
	if e.left == nil {
		e.left, err = e.system.left()
	}
	return err
}

// leftServers returns the virtual servers that were draining after a change of mode.
func (e *Engine) leftServers() map[serverKey]bool {
	if e.left == nil {
		return map[serverKey]bool{}
	}
	return e.left.servers
}

// takeBack makes the VIPs of a change of mode addresses of the device again, beside their
// routes.
func (e *Engine) takeBack() error {
	if e.left == nil {
		return nil
	}
	var vips []netip.Addr
	for vip := range e.left.vips {
		if e.boundVIPs[vip] || slices.Contains(e.local, vip) {
			continue
		}
		vips = append(vips, vip)
	}
	if err := e.device.add(vips); err != nil {
		return err
	}
	for _, vip := range vips {
		e.boundVIPs[vip], e.idleVIPs[vip] = true, true
	}
	return nil
}

// endLeft ends a change of mode: its table would refuse new connections.
func (e *Engine) endLeft() error {
	if e.left == nil {
		return nil
	}
	if err := e.left.end(); err != nil {
		return err
	}
	e.left.close()
	e.left = nil
	return nil
}
