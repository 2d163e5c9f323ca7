package programmed_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/serviceplane/serviceplane/internal/poll"
	"github.com/serviceplane/serviceplane/programmed"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// BenchmarkHandler is the time of a node's answer, from the Status of a real Provider with 10,000
// Services, with no failed service port and with 100. docs/PROGRAMMED.md has the result.
func BenchmarkHandler(b *testing.B) {
	const services = 10000
	for _, failing := range []int{0, 100} {
		b.Run("failed="+strconv.Itoa(failing), func(b *testing.B) {
			engine := &proxiertest.RecordingEngine{}
			p, err := proxier.New(proxier.Config{Families: []v1.IPFamily{v1.IPv4Protocol}}, proxier.Deps{}, map[v1.IPFamily]proxier.Engine{v1.IPv4Protocol: engine})
			if err != nil {
				b.Fatal(err)
			}
			for i := range services {
				name := "s" + strconv.Itoa(i)
				if i < failing {
					engine.Refuse(portOf(types.NamespacedName{Namespace: "shop", Name: name}), errors.New("no room"))
				}
				ip := "10.96." + strconv.Itoa(i/250) + "." + strconv.Itoa(1+i%250)
				p.OnServiceAdd(proxiertest.Service("shop", name, proxiertest.ClusterIPs(ip), proxiertest.Port("http", v1.ProtocolTCP, 80)))
			}
			proxiertest.Run(b, p)
			poll.Until(b, "everything is programmed", func() bool {
				s := p.Status().Families[v1.IPv4Protocol]
				return s.Synced && len(s.Failed) == failing && s.ServicePorts > 0
			})
			handler := programmed.Handler("node-1", p)
			request := httptest.NewRequest(http.MethodGet, "/programmed?service=shop/s1", http.NoBody)
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				if handler.ServeHTTP(w, request); w.Code != http.StatusOK {
					b.Fatal(w.Code)
				}
			}
		})
	}
}
