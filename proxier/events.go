package proxier

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/runner"
)

// OnServiceAdd implements Provider.
func (p *Proxier) OnServiceAdd(service *v1.Service) { p.OnServiceUpdate(nil, service) }

// OnServiceUpdate implements Provider.
func (p *Proxier) OnServiceUpdate(oldService, service *v1.Service) {
	if p.tracker.Services.Update(oldService, service) {
		p.triggerIfReady()
	}
}

// OnServiceDelete implements Provider.
func (p *Proxier) OnServiceDelete(service *v1.Service) { p.OnServiceUpdate(service, nil) }

// OnServiceSynced implements Provider.
func (p *Proxier) OnServiceSynced() { p.synced(changetracker.InputServices) }

// OnEndpointSliceAdd implements Provider.
func (p *Proxier) OnEndpointSliceAdd(slice *discovery.EndpointSlice) { p.onSlice(slice, false) }

// OnEndpointSliceUpdate implements Provider. It ignores the old slice.
func (p *Proxier) OnEndpointSliceUpdate(_, slice *discovery.EndpointSlice) { p.onSlice(slice, false) }

// OnEndpointSliceDelete implements Provider.
func (p *Proxier) OnEndpointSliceDelete(slice *discovery.EndpointSlice) { p.onSlice(slice, true) }

// OnEndpointSlicesSynced implements Provider.
func (p *Proxier) OnEndpointSlicesSynced() { p.synced(changetracker.InputEndpointSlices) }

// OnVersion implements Provider.
func (p *Proxier) OnVersion(input changetracker.Input, version string) {
	p.tracker.Heard(input, version)
}

// OnNodeChange implements Provider.
func (p *Proxier) OnNodeChange(node changetracker.Node) {
	p.mu.Lock()
	p.node = node
	switch lacks := p.config.lacks(node); {
	case !lacks:
		p.nodeless = time.Time{}
	case p.nodeless.IsZero():
		p.nodeless = time.Now()
	}
	p.mu.Unlock()
	wasReady := p.isReady()
	if p.tracker.SetNode(node) || !wasReady {
		p.triggerIfReady()
	}
}

// OnServiceCIDRsChanged implements Provider.
func (p *Proxier) OnServiceCIDRsChanged(cidrs []netip.Prefix) {
	p.mu.Lock()
	same := slices.Equal(p.serviceCIDRs, cidrs)
	p.serviceCIDRs = slices.Clone(cidrs)
	p.mu.Unlock()
	if !same {
		p.triggerIfReady()
	}
}

func (p *Proxier) onSlice(slice *discovery.EndpointSlice, remove bool) {
	if p.tracker.Endpoints.EndpointSliceUpdate(slice, remove) {
		p.triggerIfReady()
	}
}

func (p *Proxier) synced(input changetracker.Input) {
	p.tracker.Synced(input)
	if waiting := p.tracker.Waiting(); slices.Equal(waiting, []changetracker.Input{changetracker.InputNode}) {
		p.lonely.Do(func() {
			p.log.Info("first sync waits for the node: call OnNodeChange, or set the addresses in Config.Node")
			close(p.onlyNode)
		})
	}
	p.triggerIfReady()
}

// goOnWithoutNode ends the wait of the first sync for a node that does not come.
func (p *Proxier) goOnWithoutNode(ctx context.Context) {
	select {
	case <-p.onlyNode:
	case <-ctx.Done():
		return
	}
	if p.config.NodeTimeout == runner.Never {
		return
	}
	timeout := time.NewTimer(p.config.NodeTimeout)
	defer timeout.Stop()
	select {
	case <-p.tracker.Ready():
	case <-ctx.Done():
	case <-timeout.C:
		p.log.Warn("first sync goes on without the node: what depends on its addresses and pod CIDRs follows when it comes", zap.Duration("waited", p.config.NodeTimeout))
		p.tracker.Synced(changetracker.InputNode)
		p.triggerIfReady()
	}
}

// triggerIfReady does not spend the rate limit on syncs that would do nothing.
func (p *Proxier) triggerIfReady() {
	if p.isReady() {
		p.Trigger()
	}
}
