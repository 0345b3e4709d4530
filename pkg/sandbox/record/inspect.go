package record

import "github.com/sandboxd/sandboxd/pkg/errs"

// CodeNotInspected marks the refusal of what needs Spec.Inspect. It is answered with the status
// 412 (OpenSandbox's egress.yaml, PreconditionFailed).
const CodeNotInspected = "SANDBOX::CREDENTIAL_PROXY_NOT_ENABLED"

// NotInspected is the refusal of what needs Spec.Inspect, such as "a credential vault", for a
// sandbox that does not have it.
func NotInspected(id, what string) error {
	return errs.Wire(errs.New(errs.WrongState, "sandbox %s cannot have %s: its requests are not inspected, and that is decided when a "+
		"sandbox is created; create another one with credentialProxy.enabled (`sandboxctl create --credential-proxy`)", id, what),
		CodeNotInspected)
}

// Admits refuses a policy with rules about requests for a sandbox without Spec.Inspect.
func (r *Record) Admits(n Network) error {
	if !r.Spec.Inspect && n.AboutRequests() {
		return NotInspected(r.ID, "rules about requests")
	}
	return nil
}
